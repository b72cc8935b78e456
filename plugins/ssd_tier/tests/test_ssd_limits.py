"""A day of writing with changing models and restarts: the limit on disk holds to within a file, and so does the budget."""

from __future__ import annotations

import os
import random

import pytest
from darkbloom_ssd_tier._format import file_bytes

HOURS = 30
SIZES = (3000, 5000, 9000, 20_000)
LIMIT = 400_000
BUDGET = 2_000_000


def on_disk(place) -> dict[tuple[str, int], int]:
    """Every file in the models' folders, whatever it is: its path and inode, and its length."""
    found = {}
    for path in place.folder.glob("*/*"):
        if path.name == "lock":
            continue
        try:
            file = path.stat()
        except FileNotFoundError:  # renamed or evicted since it was listed
            continue
        found[str(path), file.st_ino] = file.st_size
    return found


def live(place, ssd, per_hour: int, seed: int):
    """Write ``per_hour`` parts in each simulated hour; checks the bounds after each."""
    chance = random.Random(seed)
    options = {"bytes_limit": LIMIT, "write_bytes_per_day": BUDGET, "ttl_seconds": 8 * 3600}
    written: list[tuple[float, int]] = []
    known: dict[tuple[str, int], int] = {}
    refused = 0
    tier = place.open("model 0", **options)
    for number in range(HOURS * per_hour):
        place.clock.ahead += 3600 / per_hour
        if chance.random() < 0.05:
            if chance.random() < 0.5:
                place.restart()
            tier = place.open(f"model {chance.randrange(3)}", **options)
        if chance.random() < 0.1:
            tier._store.keep_house()
        size = chance.choice(SIZES)
        key = ssd.part(number)
        refused += not all(ssd.offer(tier, [key], size))
        assert tier.settle()
        found = on_disk(place)
        now = place.clock()
        written += [(now, length) for each, length in found.items() if each not in known]
        known = found
        assert sum(-(-length // 4096) * 4096 for length in found.values()) <= LIMIT
        assert sum(length for at, length in written if at > now - 24 * 3600) <= BUDGET
        assert place.folder.stat().st_mode & 0o777 == 0o700
    return written, refused


def test_limits_hold_through_a_day(place, ssd):
    written, refused = live(place, ssd, per_hour=16, seed=1)
    assert refused > 0
    assert sum(length for _, length in written) > 0.9 * BUDGET


@pytest.mark.soak
def test_limits_hold_through_many_days(place, ssd, tmp_path):
    days = 2 if os.environ.get("SOAK_SAMPLE") else 40
    for seed in range(days):
        other = ssd.Place(tmp_path / str(seed))
        live(other, ssd, per_hour=24, seed=seed)
        other.close()


def test_one_write_at_the_edge_of_the_budget_is_refused(place, ssd):
    size = file_bytes(5000)
    tier = place.open(write_bytes_per_day=2 * size - 1)
    assert ssd.offer(tier, [ssd.part(1), ssd.part(2)]) == [True, False]
