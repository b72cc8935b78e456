"""A million steps of the scheduler: nobody is forgotten, nobody ends twice, nobody starves, nothing stays reserved."""

from __future__ import annotations

import pytest
from scheduler_life import longest_wait, play
from soak import keep, length

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("packed", [False, True], ids=["one by one", "packed"])
def test_a_million_steps_end_every_sequence_once_within_the_longest_wait(packed):
    steps = length(1_000_000, 20_000)
    life = play(steps, seed=2, packed=packed)
    assert life.arrived == len(life.ends) > steps // 20
    assert set(life.ends.values()) == {1}
    assert life.reserved_bytes == 0
    assert life.longest_wait <= longest_wait()
    figures = {
        "steps": steps,
        "arrived": life.arrived,
        "cancelled": life.cancelled,
        "most ends of a sequence": max(life.ends.values()),
        "reserved bytes at the end": life.reserved_bytes,
        "longest wait in steps": life.longest_wait,
        "limit of the wait in steps": longest_wait(),
        "largest pack": life.largest_pack,
    }
    summary = (
        f"{steps:,} steps, {life.arrived:,} sequences, {life.cancelled:,} cancelled: each ended once, "
        f"{life.reserved_bytes} bytes reserved at the end, longest wait {life.longest_wait:,} steps "
        f"of at most {longest_wait():,}"
    )
    keep(f"scheduler-{'packed' if packed else 'one-by-one'}", summary, figures)
