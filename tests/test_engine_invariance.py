"""What a row gets does not depend on who its neighbours are, nor on when they come and go.

Every checkpoint of an installed family is played, a random model of each, and toys with
every kind of layer.
Where each promise about batches, storage, admission and planning is kept:

| promise | test |
|---|---|
| equal to its run alone beside 1, 2, 3 neighbours, 64 steps, windows crossed several times | ``test_a_row_beside_neighbours_...`` |
| joining in the middle, leaving, lanes used again: 50 events | ``test_a_churn_of_50_events_...`` |
| generated schedules, greedy and seeded, cancelled or not | ``test_every_row_of_generated_schedules_...`` |
| sinks | all of them: ``toy/windows``, ``toy/full`` and GPT-OSS have sinks |
| seeded sampling at T 0.8, top-p 0.9, seed 42 | the generated schedules; ``test_engine.py`` |
| compiled, chained, packed, deterministic: the same tokens, a buffer outgrown on the way | ``test_all_ways_to_run_...`` |
| equal bits in deterministic mode, and a control | ``test_in_deterministic_mode_...``, ``test_with_openblas_...`` |
| admission to the byte, resizing under load | ``test_engine_admission.py`` |
| a prompt's chunks; a span is never split | ``test_engine_scheduler.py``, ``test_engine_admission.py`` |
| 60 requests of a Poisson process leave nothing behind | ``test_60_requests_...`` |
| one host sync per step, nothing copied when rows join or leave | ``test_engine_counted.py`` |
| a restored prefix, a step back | ``test_engine_restore.py`` |
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from invariance import MODES, TOYS, Comparison, Subject, blas, names, noise, open_subject
from schedules import Asked
from soak import keep, length
from toy_family import ToyModel

from darkbloom_core.engine import KvStore
from darkbloom_core.plugins import load_plugins

SUMMED = ("schedules", "rows", "tokens", "decode_steps", "ties", "logits", "logits_with_other_bits")
SCRIPT = Path(__file__).parent / "support" / "invariance.py"
SAMPLE = os.environ.get("SOAK_SAMPLE") == "1"
LIBRARIES = ["own", "openblas"] if sys.platform == "linux" else ["own"]


@pytest.fixture
def subject():
    """Open subjects that are closed at the end."""
    opened = []

    def make(*which, **options) -> Subject:
        opened.append(open_subject(*which, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.stage.close()


def check(found: Comparison, schedules: int) -> None:
    """Every token that was expected came, and something was compared at all."""
    assert found.wrong == []
    assert found.schedules == schedules
    assert found.tokens > found.decode_steps > schedules  # rows did share steps


def test_every_installed_family_has_a_checkpoint_that_is_played() -> None:
    plugins = load_plugins()
    configs = [json.loads((path / "config.json").read_text()) for path in plugins.checkpoints().values()]
    played = {plugins.family_for(config).name for config in configs}
    assert played == {family.name for family in plugins.families()}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("toy/windows", "default"),
        ("toy/recurrent", "default"),
        ("toy/full", "together"),
        ("toy/borrowing", "together"),
        ("toy/windows", "compiled"),
        ("toy/recurrent", "compiled"),
    ],
)
def test_every_row_of_generated_schedules_gets_the_tokens_it_gets_alone(subject, name, mode):
    check(subject(name, mode, most_tokens=40).compare(1), 1)


@pytest.mark.soak
@pytest.mark.parametrize("name", load_plugins().checkpoints())
def test_every_row_of_a_generated_schedule_of_a_family_gets_the_tokens_it_gets_alone(subject, name):
    playing = subject(name, "default", most_tokens=10)
    playing.prompts = [prompt for prompt in playing.prompts if len(prompt) < 200]
    check(playing.compare(1), 1)


@pytest.mark.parametrize("name", ["toy/windows", "toy/borrowing", "toy/recurrent"])
def test_in_deterministic_mode_rows_have_the_bits_that_they_have_alone(subject, name):
    playing = subject(name, "deterministic", most_tokens=40)
    assert not playing.stage.engine.status().choices.packed
    found = playing.compare(1)
    check(found, 1)
    assert found.logits > 50
    assert found.logits_with_other_bits == 0


@pytest.mark.parametrize("neighbours", [1, 2, 3])
def test_a_row_beside_neighbours_gets_the_tokens_of_the_oracle(subject, neighbours):
    playing = subject("toy/windows", "default")
    prompt = noise(24)
    others = [Asked(noise(10 + 7 * n, n + 1), 60, joins_at=30 * n) for n in range(neighbours)]
    row, *_ = playing.stage.play([Asked(prompt, 64), *others])
    assert row.tokens == ToyModel(TOYS["toy/windows"]).greedy(prompt, 64)


@pytest.mark.soak
def test_a_churn_of_50_events_leaves_every_row_as_it_is_alone(subject):
    playing = subject("toy/borrowing", "default")
    chance = np.random.default_rng(50)
    rows = [
        Asked(
            prompt=playing.prompts[chance.integers(len(playing.prompts))],
            max_tokens=int(chance.integers(2, 30)),
            seed=[None, 42][number % 2],
            joins_at=12 * number,
            cancelled_at=12 * number + 20 if number % 5 == 0 else None,
        )
        for number in range(25)
    ]
    found = Comparison(playing.name, "default", blas())
    playing.add(found, rows)
    check(found, 1)
    assert playing.is_at_rest()


@pytest.mark.soak
def test_60_requests_of_a_poisson_process_leave_nothing_behind(subject):
    playing = subject("toy/borrowing", "default", waiting_limit=60)
    chance = np.random.default_rng(60)
    arrivals = np.cumsum(chance.exponential(6, 60)).astype(int)
    rows = [
        Asked(playing.prompts[number % len(playing.prompts)], int(chance.integers(1, 15)), joins_at=int(at))
        for number, at in enumerate(arrivals)
    ]
    found = Comparison(playing.name, "default", blas())
    playing.add(found, rows)
    check(found, 1)
    assert found.largest_batch == 4
    assert playing.is_at_rest()


def test_all_ways_to_run_give_the_same_tokens_also_where_a_row_outgrows_the_shared_slab(subject):
    outputs = []
    for mode in MODES:
        playing = subject("toy/windows", mode, grant_bytes=1 << 22)
        store: KvStore = playing.stage.engine._loop.store
        assert store.shared_tokens == 512
        rows = [
            Asked(noise(500), 40),
            Asked(noise(490, 1), 60, seed=42),
            Asked(noise(9, 2), 60, joins_at=20),
        ]
        outputs.append([row.tokens for row in playing.stage.play(rows)])
    assert len(outputs) == 4
    assert all(output == outputs[0] for output in outputs)
    assert [len(tokens) for tokens in outputs[0]] == [40, 60, 60]


# --- the same where another BLAS answers -------------------------------------------------


def found_by_a_process(library: str, mode: str, schedules: int, part: int, subjects: list[str]) -> list[dict]:
    """What the script finds in a process of its own, in which OpenBLAS answers if ``library`` says so."""
    preloaded = {"LD_PRELOAD": "libopenblas.so.0"} if library == "openblas" else {}
    command = [sys.executable, SCRIPT, "--mode", mode, "--schedules", str(schedules), "--part", str(part)]
    done = subprocess.run(
        [*command, *subjects], env={**os.environ, **preloaded}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for each in found:
        assert each["blas"] == library
        assert each["wrong"] == []
        assert each["schedules"] == schedules
        assert each["logits"] > schedules
    return found


SUBJECTS = {"toy": list(TOYS), **{name: [name] for name in names()}}

if "openblas" in LIBRARIES:

    @pytest.mark.system
    @pytest.mark.parametrize("name", SUBJECTS)
    def test_with_openblas_no_bit_depends_on_neighbours_in_deterministic_mode(name):
        for each in found_by_a_process("openblas", "deterministic", 3, 0, SUBJECTS[name]):
            assert each["logits_with_other_bits"] == 0, each

    @pytest.mark.system
    def test_with_openblas_bits_do_depend_on_neighbours_by_default():
        found = [found_by_a_process("openblas", "default", 3, 0, SUBJECTS[name]) for name in SUBJECTS]
        assert sum(each["logits_with_other_bits"] for part in found for each in part) > 0


CELLS = [("default", "own"), ("compiled", "own")]
if "openblas" in LIBRARIES:
    CELLS += [(mode, "openblas") for mode in ("default", "together", "compiled", "deterministic")]
PARTS = 4


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("mode", "library"), CELLS[:1] if SAMPLE else CELLS)
@pytest.mark.parametrize("name", ["toy"] if SAMPLE else SUBJECTS)
def test_every_row_of_many_generated_schedules_gets_what_it_gets_alone(name, mode, library):
    count = length(50, 1)
    parts = [found_by_a_process(library, mode, count, part, SUBJECTS[name]) for part in range(PARTS)]
    found = [each for part in parts for each in part]
    total = {what: sum(each[what] for each in found) for what in SUMMED}
    if mode == "deterministic":
        assert total["logits_with_other_bits"] == 0
    keep(
        f"invariance-{name.replace('/', '-')}-{mode}-{library}",
        f"{total['schedules']:,} schedules, {total['rows']:,} rows, {total['tokens']:,} tokens: all as alone; "
        f"logits with other bits than alone {total['logits_with_other_bits']:,} of {total['logits']:,}",
        {**total, "largest difference of a logit": max(each["largest_difference"] for each in found)},
    )
