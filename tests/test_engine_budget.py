"""The prefix cache's memory: reserved in the model's share, and given up to whoever needs it, at once."""

from __future__ import annotations

import time

import pytest
from toy_engine import wait_for
from toy_family import ToyModel, full, window
from warm import Warm, noise

from darkbloom_core.contracts import PartKey
from darkbloom_core.engine import row_bytes
from darkbloom_core.engine._budget import CacheBudget
from darkbloom_core.memory import FixedReadings, Ledger, Reclaimer
from darkbloom_core.prefix import RamTier

LAYERS = [window(300), full()]
PART = 100


def budget_of(limit: int, most: int | None = None) -> tuple[CacheBudget, RamTier]:
    ram = RamTier(0)
    return CacheBudget(Ledger().share("model", limit), ram, most), ram


def keep(budget: CacheBudget, ram: RamTier, count: int, first: int = 0) -> int:
    """Offer parts of ``PART`` bytes; gives how many of all are held."""
    for number in range(first, first + count):
        budget.grow(PART)
        key, parent = PartKey(bytes([number]) * 32, "full"), bytes([number - 1]) * 32 if number else None
        ram.keep(key, object(), PART, saves_milliseconds=1.0, parent=parent)
    return ram.bytes_used // PART


def test_the_cache_grows_as_it_is_filled_up_to_a_quarter_of_the_grant():
    budget, ram = budget_of(4000)
    assert budget.reserved_bytes == 0
    assert keep(budget, ram, 3) == 3
    assert budget.reserved_bytes == 300
    assert keep(budget, ram, 20, 3) == 10
    assert budget.reserved_bytes == 1000


def test_the_cache_takes_only_what_live_requests_leave():
    budget, ram = budget_of(1000, 800)
    assert budget.reserve("request", 700)
    assert keep(budget, ram, 20) == 3
    assert budget.reserved_bytes == 300


def test_a_live_request_gets_what_the_cache_holds():
    budget, ram = budget_of(1000, 1000)
    assert keep(budget, ram, 20) == 10
    assert budget.reserve("request", 700)
    assert ram.bytes_used == budget.reserved_bytes == 300
    assert not budget.reserve("another", 400)  # would not fit without any cache, so the cache stays
    assert ram.bytes_used == 300
    budget._share.release("request")
    assert keep(budget, ram, 10, 3) == 10


def test_what_is_in_use_stays_reserved_until_it_is_let_go():
    budget, ram = budget_of(1000, 1000)
    keep(budget, ram, 10)
    with ram.pin([PartKey(bytes([number]) * 32, "full") for number in range(6)]):
        assert not budget.reserve("request", 700)
        assert budget.reserved_bytes == ram.bytes_used == 600
    assert budget.reserve("request", 700)


def test_a_smaller_grant_shrinks_the_cache_first():
    budget, ram = budget_of(1000, 1000)
    keep(budget, ram, 5)
    assert budget.reserve("request", 300)
    budget._share.resize(500)
    budget.fit()
    assert ram.bytes_used == 200
    budget._share.resize(100)
    budget.fit()
    assert ram.bytes_used == budget.reserved_bytes == 0
    assert budget._share.reservations() == {"request": 300}


def test_trimming_gives_what_was_asked_for_or_all_there_is():
    budget, ram = budget_of(1000, 1000)
    keep(budget, ram, 10)
    assert budget.trim(150) == 200
    assert budget.reserved_bytes == 850
    assert budget.trim(10_000) == 800
    assert budget.reserved_bytes == 0


def test_where_the_machine_lacks_memory_the_cache_does_not_grow_and_nobody_is_told():
    told: list[int] = []
    share = Ledger(lambda pool: 250, on_shortfall=told.append).share("model", 1000)
    ram = RamTier(0)
    budget = CacheBudget(share, ram, 1000)
    assert keep(budget, ram, 5) == 2
    assert told == []


@pytest.fixture
def tight():
    """An engine whose grant holds its slabs, and rows of 3,000 tokens in all."""
    with Warm(ToyModel(LAYERS), grant=1 << 20, ram_bytes=1 << 30) as warm:
        yield warm


def test_in_an_engine_requests_are_admitted_as_if_there_were_no_cache(tight):
    engine = tight.engine
    free = engine._share.limit_bytes - engine.slab_bytes
    for seed in range(6):
        tight.run(noise(1000, seed), 1)
    assert tight.status.tiers["ram"].evicted > 0
    left = engine._share.limit_bytes - engine._share.reserved_bytes
    assert left < row_bytes(LAYERS, 1001) + 50_000  # the cache fills what the last request has left
    tokens = 1500
    most = free // row_bytes(LAYERS, tokens + 500)
    assert most >= 2
    streams = [tight.submit(str(number), noise(tokens, number), 500) for number in range(most)]
    wait_for(lambda: engine.status().running == most or engine.status().output_tokens > 400)
    assert engine.status().waiting == 0
    assert all(list(stream)[-1].error is None for stream in streams)
    wait_for(tight.is_at_rest)


def test_a_smaller_grant_leaves_running_requests_alone_and_shrinks_the_cache_at_once(tight):
    for seed in range(3):
        tight.run(noise(1000, seed), 1)
    engine = tight.engine
    assert engine.cache_bytes > 100_000
    running = tight.submit("running", noise(600), 300)
    next(iter(running))
    engine.resize(engine.slab_bytes + row_bytes(LAYERS, 900) + 10_000)
    assert engine.cache_bytes <= 10_000
    assert list(running)[-1].reason == "length"
    wait_for(tight.is_at_rest)


def test_when_the_machine_runs_out_the_cache_goes_first():
    """A memory-pressure drill: another program takes what was free, and requests go on."""
    machine = {"free": 1 << 22}
    readings = FixedReadings(1 << 30)
    warm: list[Warm] = []

    def headroom(_) -> int:
        return machine["free"] - sum(each.engine._share.allocated() - each.engine.slab_bytes for each in warm)

    reclaimer = Reclaimer(
        readings, lambda: warm[0].engine.wake(), lambda size: drop(warm[0].engine, readings, size)
    )
    ledger = Ledger(headroom, on_shortfall=reclaimer.want)
    with Warm(ToyModel(LAYERS), grant=1 << 20, share=ledger.share("drill"), ram_bytes=1 << 30) as each:
        warm.append(each)
        for seed in range(3):
            each.run(noise(1000, seed), 1)
        held = each.engine.cache_bytes
        request = row_bytes(LAYERS, 1100)
        machine["free"] = held + request // 2
        began = time.monotonic()
        events = list(each.submit("live", noise(1000, 9), 100))
        assert events[-1].reason == "length"
        assert time.monotonic() - began < 5
        assert each.status.tiers["ram"].evicted > 0
        assert each.engine.cache_bytes <= machine["free"]
    reclaimer.close()
    assert ledger.reservations() == {}


def drop(engine, readings: FixedReadings, size: int) -> None:
    """What is dropped is in MLX's cache, until it is flushed."""
    readings.cached_bytes += max(size, engine.trim_cache(size))
