"""A day of writing with changing models and restarts: the limit on disk holds to within a file, and so does the budget."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from darkbloom_ssd_tier._format import file_bytes
from soak import keep, length

HOURS = 30
SIZES = (3000, 5000, 9000, 20_000)
LIMIT = 400_000
BUDGET = 2_000_000


class Lived(NamedTuple):
    """What a simulated life came to, in bytes and parts."""

    written_bytes: int
    refused: int
    most_on_disk: int
    most_in_a_day: int


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
    most_on_disk = most_in_a_day = 0
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
        written += [(now, size) for each, size in found.items() if each not in known]
        known = found
        most_on_disk = max(most_on_disk, sum(-(-size // 4096) * 4096 for size in found.values()))
        most_in_a_day = max(most_in_a_day, sum(size for at, size in written if at > now - 24 * 3600))
        assert most_on_disk <= LIMIT
        assert most_in_a_day <= BUDGET
        assert place.folder.stat().st_mode & 0o777 == 0o700
    return Lived(sum(size for _, size in written), refused, most_on_disk, most_in_a_day)


def test_limits_hold_through_a_day(place, ssd):
    lived = live(place, ssd, per_hour=16, seed=1)
    assert lived.refused > 0
    assert lived.written_bytes > 0.9 * BUDGET


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_limits_hold_through_many_days(ssd, tmp_path):
    days, all_of_them = length(40, 2), []
    for seed in range(days):
        other = ssd.Place(tmp_path / str(seed))
        all_of_them.append(live(other, ssd, per_hour=24, seed=seed))
        other.close()
    most = max(each.most_on_disk for each in all_of_them)
    in_a_day = max(each.most_in_a_day for each in all_of_them)
    keep(
        "ssd-limits",
        f"{days} times {HOURS} simulated hours of writes, 3 models, restarts: at most {most} bytes on disk of "
        f"{LIMIT}, {in_a_day} written in 24 hours of {BUDGET}",
        {"lives": days, "hours": HOURS, "bytes_limit": LIMIT, "write_bytes_per_day": BUDGET,
         "most_on_disk": [each.most_on_disk for each in all_of_them],
         "most_in_a_day": [each.most_in_a_day for each in all_of_them],
         "refused": [each.refused for each in all_of_them]},
    )  # fmt: skip


def test_one_write_at_the_edge_of_the_budget_is_refused(place, ssd):
    size = file_bytes(5000)
    tier = place.open(write_bytes_per_day=2 * size - 1)
    assert ssd.offer(tier, [ssd.part(1), ssd.part(2)]) == [True, False]
