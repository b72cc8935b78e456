"""Requests that share beginnings come, go and leave while the cache is evicted, resized, slow and broken.

Always: no wrong text, and in the end nothing is pinned, staged or reserved.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from soak import keep, length
from toy_engine import wait_for
from toy_family import ToyModel, full, text_of, window
from warm import BytesTier, Warm, noise

from darkbloom_core.errors import CapacityExhausted
from darkbloom_core.memory import Ledger

LAYERS = [window(300), full(), full(source=1)]
GRANT = 3 << 20


class RestlessTier(BytesTier):
    """Answers late, or never in time, or raises, or lies; ``seed`` decides."""

    def __init__(self, seed: int):
        super().__init__()
        self.chance = random.Random(seed)

    def fetch(self, fetches):
        if self.chance.random() < 0.1:
            raise OSError("no luck")
        return super().fetch(fetches)

    def _read(self, fetches):
        time.sleep(self.chance.choice([0, 0, 0.005, 0.1]))
        return [found and self.chance.random() < 0.98 for found in super()._read(fetches)]


def play(seconds: float, seed: int, least: dict[str, int]) -> Counter:
    """Play for so long, and on until each of ``least`` was seen so often; gives how requests ended and what was reused."""
    prompts = [
        noise(tokens, branch)[: 256 * (branch % 3)] + noise(tokens, 100 + branch)
        for branch in range(4)
        for tokens in (300, 700)
    ]
    prompts = [*(noise(700) + prompt for prompt in prompts[:4]), *prompts]
    model, ledger = ToyModel(LAYERS), Ledger()
    with Warm(model, ram_bytes=0) as cold:
        expected = [text_of(list(cold.submit("c", prompt, 6))) for prompt in prompts]
    found: Counter = Counter()
    wrong: list[str] = []
    tier = RestlessTier(seed)
    warm = Warm(
        model, grant=GRANT, share=ledger.share("chaos"), ram_bytes=1 << 19, open_tiers=lambda: {"restless": tier},
        engine={"max_rows": 4, "slice_seconds": 1e-9},
    )  # fmt: skip
    began = time.monotonic()

    def is_over() -> bool:
        now, outcomes = time.monotonic() - began, warm.status.outcomes
        seen = all(max(found[what], outcomes.get(what, 0)) >= count for what, count in least.items())
        return now > seconds and (seen or now > 60)

    def ask(number: int) -> None:
        chance, count = random.Random(f"{seed} {number}"), 0
        while not is_over():
            which, count = chance.randrange(len(prompts)), count + 1
            try:
                stream = warm.submit(f"{number} {count}", prompts[which], 6)
            except CapacityExhausted:
                found["refused"] += 1
                continue
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.05)
                stream.cancel()
            *_, last = events = list(stream)
            found[last.reason] += 1
            found["reused"] += last.usage.cached_tokens
            if last.reason == "length" and text_of(events) != expected[which]:
                wrong.append(f"{which}: {last.usage}")

    def disturb() -> None:
        chance = random.Random(seed)
        while not is_over():
            time.sleep(chance.random() * 0.05)
            action = chance.randrange(3)
            if action == 0:
                warm.engine.trim_cache(chance.randrange(1 << 19))
            elif action == 1:
                warm.engine.resize(chance.randint(GRANT // 2, GRANT))
            else:
                warm.engine.wake()

    with ThreadPoolExecutor(7) as pool:
        for task in [*(pool.submit(ask, number) for number in range(6)), pool.submit(disturb)]:
            task.result()
    assert wrong == []
    wait_for(warm.is_at_rest)
    wait_for(lambda: not any(key.startswith("staging/") for key in ledger.reservations()))
    found.update(warm.status.outcomes)
    found["waits"] = warm.status.waits
    unload_while_busy(warm, prompts)
    assert ledger.reservations() == {}
    return found


def unload_while_busy(warm: Warm, prompts: list[list[int]]) -> None:
    """Close the engine while requests wait, stage, adopt and run."""
    streams = [warm.submit(f"last {number}", prompt, 50) for number, prompt in enumerate(prompts)]
    time.sleep(0.02)
    ram = warm.reuse.stack.ram
    warm.engine.close()
    assert all(list(stream)[-1].reason in ("cancelled", "length") for stream in streams)
    assert ram.bytes_used == 0


@pytest.mark.soak
def test_chaos_leaves_no_wrong_text_and_nothing_behind():
    least = {"length": 5, "cancelled": 2, "hit": 3}
    found = play(1.0, 1, least)
    assert {what: found[what] for what in least if found[what] < least[what]} == {}


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_long_chaos_leaves_no_wrong_text_and_nothing_behind():
    found: Counter = Counter()
    for seed in range(length(20, 2)):
        found.update(play(length(30, 2), seed, {"hit": 1}))
    assert found["hit"] > 5
    keep("prefix-chaos", ", ".join(f"{count} {what}" for what, count in sorted(found.items())), dict(found))
