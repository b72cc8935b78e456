"""``darkbloom bench prefix`` and ``prefix-bits``, in runs so small that their times mean nothing."""

import json

import pytest
from darkbloom_bench._bits import Bits, Ran

from darkbloom_core.cli import main


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run a command of the group; gives its exit code."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["bench", *arguments])
        return left.value.code

    return run


@pytest.mark.soak
def test_warm_requests_are_timed_beside_cold_ones_and_the_peers(bench, tmp_path, capsys):
    file = tmp_path / "cells.json"
    asked = ("--model", "demo/gpt-oss", "--prompt-tokens", "257", "--repeats", "1", "--against", "mlx-lm")
    assert bench("prefix", *asked, "--json", str(file)) == 0
    cells = {cell["metric"]: cell for cell in json.loads(file.read_text())}
    assert list(cells) == [
        "first token, cold",
        "first token, repeated",
        "first token, next turn",
        "cold, by cold without reuse",
        "cold by repeated",
        "cached, repeated",
        "cold by next turn",
        "cached, next turn",
    ]
    assert all(cell["workload"] == "257 tokens" for cell in cells.values())
    assert (cells["cached, repeated"]["ours"], cells["cached, next turn"]["ours"]) == (256, 256)
    assert cells["cached, next turn"]["peer"] == 257 + 8  # what it remembers ends with the answer
    cold, known = (cells[f"first token, {case}"]["ours"] for case in ("cold", "repeated"))
    assert cells["cold by repeated"]["ours"] == pytest.approx(cold / known)
    assert "257 tokens, peer, warm-up" in capsys.readouterr().err


@pytest.mark.soak
def test_bits_are_compared_and_a_control_is_run(bench, tmp_path, capsys):
    file = tmp_path / "bits.json"
    assert bench("prefix-bits", "--model", "demo/gpt-oss", "--prompt-tokens", "257", "--json", str(file)) == 0
    repeated, grown, *controls = json.loads(file.read_text())
    assert (repeated["what"], grown["what"]) == ("repeated", "grown")
    assert [(each["what"], each["cached_tokens"]) for each in controls] == [
        ("off the grid", 256),
        ("decoded", 512),
    ]
    for one in (repeated, grown):
        assert (one["cached_tokens"], one["steps"]) == (256, 8)
        assert (one["differing_steps"], one["differing_logits"]) == (0, 0)
        assert one["logits"] >= 8 * 1000
    assert "grown: 590 tokens, 256 cached, 0 of 8 steps differ" in capsys.readouterr().out


class Answers(Bits):
    """Bits of runs that are given."""

    def __init__(self, warm, cold):
        self._given = {False: Ran(256, warm, ()), True: Ran(0, cold, ())}

    def run(self, prompt, *, cold=False, new_tokens=8):
        return self._given[cold]


def test_a_single_bit_is_seen():
    same, other = bytes(8), bytes(7) + b"\x01"
    found = Answers((same, same), (same, other)).compare("made up", [1, 2, 3])
    assert (found.steps, found.differing_steps, found.differing_logits, found.logits) == (2, 1, 1, 8)
    assert Answers((same,), (same,)).compare("made up", [1]).differing_steps == 0


@pytest.mark.parametrize("text", ["", "many", "0", "5,-1"])
def test_lengths_that_are_none_are_one_line_on_stderr(bench, capsys, text):
    assert bench("prefix", "--model", "demo/gpt-oss", "--prompt-tokens", text) == 2
    assert "--prompt-tokens: numbers with commas between" in capsys.readouterr().err
