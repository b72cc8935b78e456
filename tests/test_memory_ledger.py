"""The ledger: shares and pools under contention, its audit, and the reclaimer that it calls for help."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.memory import FixedReadings, FlushRule, Ledger, Reclaimer

GIB = 1024**3


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_concurrent_reservations_never_exceed_the_limit_or_the_headroom():
    ledger = Ledger(lambda pool: 1500)
    shares = [ledger.share("one", 1000), ledger.share("two", 1000)]
    taken: list[tuple[int, str]] = []
    seen: list[int] = []

    def take(thread: int) -> None:
        share = shares[thread % 2]
        for number in range(100):
            key = f"{thread}-{number}"
            if share.reserve(key, 7):
                taken.append((thread % 2, key))
            seen.append(ledger.outstanding_bytes("device"))

    threads = [threading.Thread(target=take, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1500 // 7
    assert max(seen) <= 1500
    assert all(share.reserved_bytes <= 1000 for share in shares)
    for index, key in taken:
        shares[index].release(key)
        shares[index].release(key)
    assert ledger.reservations() == {}


def test_the_same_key_twice_is_refused_and_the_first_stays():
    ledger = Ledger(lambda pool: 100)
    assert ledger.reserve("a", 4, "media")
    assert not ledger.reserve("a", 1, "blocks")
    share = ledger.share("model", 50)
    assert share.reserve("a", 5)
    assert not share.reserve("a", 1)
    assert share.reservations() == {"a": 5}
    assert ledger.reservations()["a"].size_bytes == 4


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_and_less_is_no_reservation(size):
    assert not Ledger(lambda pool: 100).reserve("a", size, "media")


def test_a_size_beyond_any_number_of_bytes_is_refused():
    assert not Ledger(lambda pool: 2**70).reserve("a", 2**65, "media")


def test_shrinking_a_share_leaves_reservations_and_refuses_new_ones():
    share = Ledger().share("model", 10)
    assert share.reserve("a", 8)
    share.resize(5)
    assert share.reserved_bytes == 8
    assert not share.reserve("b", 1)
    share.release("a")
    assert share.reserve("b", 5)


def test_what_is_allocated_already_is_not_counted_twice():
    ledger = Ledger(lambda pool: 10)
    share = ledger.share("model", 100)
    assert share.reserve("a", 8)
    assert not share.reserve("b", 8)
    share.allocated = lambda: 6
    assert ledger.outstanding_bytes("device") == 2
    assert share.reserve("b", 8)


def test_a_model_that_loads_is_missing_from_what_others_may_reserve():
    ledger = Ledger(lambda pool: 40 * GIB)
    share = ledger.share("running", 100 * GIB)
    assert ledger.claim_load("other", 14 * GIB, lambda outstanding: outstanding == 0)
    assert not share.reserve("request", 26 * GIB + 1)
    assert share.reserve("request", 26 * GIB)
    ledger.release("other")
    ledger.release("other")
    assert ledger.outstanding_bytes("device") == 26 * GIB


def test_nobody_reserves_between_the_check_of_a_load_and_its_claim():
    ledger = Ledger(lambda pool: 100)
    share = ledger.share("running", 100)
    order = []

    def admits(outstanding: int) -> bool:
        thread.start()
        time.sleep(0.05)  # the other thread has every chance to come in between
        order.append("checked")
        return outstanding == 0

    def reserve() -> None:
        made = share.reserve("request", 60)
        order.append("reserved" if made else "refused")

    thread = threading.Thread(target=reserve)
    assert ledger.claim_load("other", 60, admits)
    thread.join()
    assert order == ["checked", "refused"]


def test_a_refused_load_claims_nothing_and_a_repeated_one_replaces_its_claim():
    ledger = Ledger(lambda pool: 100)
    assert not ledger.claim_load("other", 60, lambda outstanding: False)
    assert ledger.reservations() == {}
    assert ledger.claim_load("other", 60, lambda outstanding: True)
    assert ledger.claim_load("other", 70, lambda outstanding: outstanding == 0)
    assert ledger.outstanding_bytes("device") == 70


def test_reducing_never_grows_and_growing_is_gated():
    ledger = Ledger(lambda pool: 10)
    assert ledger.reserve("a", 6, "blocks")
    ledger.reduce("a", 9)
    assert ledger.outstanding_bytes("device") == 6
    ledger.reduce("a", 4)
    ledger.reduce("unknown", 1)
    assert ledger.outstanding_bytes("device") == 4
    assert not ledger.resize("a", 11)
    assert ledger.resize("a", 10)
    assert ledger.resize("a", 1)
    assert not ledger.resize("unknown", 1)


def test_host_and_device_are_one_pool_only_on_unified_memory():
    unified = Ledger(lambda pool: 10)
    assert unified.reserve("media", 6, "media", "host")
    assert not unified.reserve("kv", 6, "kv")
    discrete = Ledger(lambda pool: 10, unified=False)
    assert discrete.reserve("media", 6, "media", "host")
    assert discrete.reserve("kv", 6, "kv")
    assert not discrete.reserve("more media", 6, "media", "host")


def test_closing_a_share_gives_everything_back_and_its_name_free():
    ledger = Ledger(lambda pool: 10)
    share = ledger.share("model", 10)
    with pytest.raises(ValueError, match="already"):
        ledger.share("model", 10)
    assert share.reserve("a", 10)
    share.close()
    share.close()
    share.release("a")
    assert ledger.outstanding_bytes("device") == 0
    assert ledger.share("model", 10).reserve("a", 10)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["reserve", "release", "limit"]), st.integers(0, 5), st.integers(0, 60)),
    max_size=40,
)


@given(ACTIONS)
def test_no_history_lifts_a_share_over_its_limit(actions):
    ledger = Ledger(lambda pool: 100)
    share = ledger.share("model", 50)
    held: dict[str, int] = {}
    for action, key, size in actions:
        if action == "reserve":
            fits = str(key) not in held and sum(held.values()) + size <= share.limit_bytes
            assert share.reserve(str(key), size) == (fits and sum(held.values()) + size <= 100)
            held = dict(share.reservations())
        elif action == "release":
            share.release(str(key))
            held.pop(str(key), None)
        else:
            share.resize(size)
    assert share.reservations() == held


# --- audit ---------------------------------------------------------------------------------


def stuck_ledger(clock: Clock, is_held=lambda: False) -> Ledger:
    """A ledger that is full, by a reservation made ten minutes and more ago."""
    ledger = Ledger(lambda pool: 10, clock=clock)
    assert ledger.reserve("old", 10, "blocks", is_held=is_held)
    clock.now += 601
    return ledger


def refuse_for(ledger: Ledger, clock: Clock, seconds: int, gap: int = 10) -> None:
    for _ in range(seconds // gap):
        assert not ledger.reserve("new", 10, "blocks")
        clock.now += gap


def test_a_stale_reservation_goes_only_after_two_minutes_of_nothing_but_refusals(caplog):
    clock = Clock()
    ledger = stuck_ledger(clock)
    with caplog.at_level(logging.WARNING):
        refuse_for(ledger, clock, 120)
        assert not caplog.records
        assert not ledger.reserve("new", 10, "blocks")
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "old: blocks, 10 bytes, 721 s old" in caplog.text
    assert ledger.reserve("new", 10, "blocks")


def test_a_reservation_that_somebody_holds_is_never_stale():
    clock = Clock()
    ledger = stuck_ledger(clock, is_held=lambda: True)
    refuse_for(ledger, clock, 1000)
    assert "old" in ledger.reservations()


def test_a_young_reservation_is_not_stale():
    clock = Clock()
    ledger = Ledger(lambda pool: 10, clock=clock)
    assert ledger.reserve("young", 10, "blocks")
    refuse_for(ledger, clock, 590)
    assert "young" in ledger.reservations()
    refuse_for(ledger, clock, 80)
    assert "young" not in ledger.reservations()


def test_the_table_is_reported_at_most_once_a_minute(caplog):
    clock = Clock()
    ledger = stuck_ledger(clock, is_held=lambda: True)
    with caplog.at_level(logging.ERROR):
        refuse_for(ledger, clock, 301)
    assert len(caplog.records) == 3


@pytest.mark.parametrize("rescue", ["success", "release", "gap"])
def test_a_success_a_release_or_a_long_gap_starts_the_count_anew(rescue):
    clock = Clock()
    ledger = stuck_ledger(clock)
    share = ledger.share("model", 10)
    assert share.reserve("request", 0)
    for _ in range(5):
        refuse_for(ledger, clock, 110)
        if rescue == "success":
            assert share.reserve(f"at {clock.now}", 0)
        elif rescue == "release":
            share.release("request")
            share = ledger.share(f"at {clock.now}", 10)
            assert share.reserve("request", 0)
        else:
            clock.now += 21
    assert "old" in ledger.reservations()


def test_releasing_what_is_not_reserved_does_not_start_the_count_anew():
    clock = Clock()
    ledger = stuck_ledger(clock)
    for _ in range(13):
        refuse_for(ledger, clock, 10)
        ledger.release("unknown")
    assert "old" not in ledger.reservations()


# --- reclaimer -----------------------------------------------------------------------------


def test_a_near_miss_is_refused_at_once_and_only_signalled():
    shortfalls: list[int] = []
    ledger = Ledger(lambda pool: 10, on_shortfall=shortfalls.append)
    assert not ledger.reserve("a", 13, "blocks")
    assert shortfalls == [3]
    assert not ledger.share("model", 5).reserve("a", 6)
    assert shortfalls == [3]


def test_a_flush_must_cover_what_was_missing_and_comes_at_most_once_a_second():
    rule = FlushRule()
    assert not rule.allows(0.0, cached_bytes=9, shortfall_bytes=10)
    assert rule.allows(0.0, cached_bytes=10, shortfall_bytes=10)
    rule.flushed(0.0)
    assert not rule.allows(0.9, cached_bytes=100, shortfall_bytes=10)
    assert rule.seconds_to_wait(0.75) == 0.25
    assert rule.allows(1.0, cached_bytes=100, shortfall_bytes=10)


def test_a_sweep_needs_two_gib():
    assert not FlushRule().allows(0.0, cached_bytes=2 * GIB - 1, shortfall_bytes=None)
    assert FlushRule().allows(0.0, cached_bytes=2 * GIB, shortfall_bytes=None)


def test_a_slow_flush_holds_no_reservation_up():
    flushing, go_on = threading.Event(), threading.Event()

    def flush() -> None:
        flushing.set()
        assert go_on.wait(10)

    readings = FixedReadings(100, used_bytes=60, cached_bytes=50, on_clear=flush)
    reclaimer = Reclaimer(readings)
    ledger = Ledger(lambda pool: 10, on_shortfall=reclaimer.want)
    assert not ledger.reserve("large", 20, "blocks")
    assert flushing.wait(10)
    assert ledger.reserve("small", 5, "blocks")  # while the flush is still going on
    go_on.set()
    reclaimer.close()
    assert readings.cached_bytes == 0


def test_what_can_be_done_without_is_given_up_before_the_flush_and_only_for_who_lacked_something():
    told = threading.Event()
    readings, asked = FixedReadings(1000, 600), []

    def give_up(size: int) -> None:
        asked.append(size)
        readings.cached_bytes += size  # what is dropped stays in MLX's cache until the flush

    reclaimer = Reclaimer(readings, told.set, give_up)
    reclaimer.want(40)
    assert told.wait(10)
    reclaimer.close()
    assert asked == [40]
    assert readings.cached_bytes == 0


def test_a_cache_in_a_share_grows_and_shrinks_and_its_refusals_count_for_nothing():
    told: list[int] = []
    ledger = Ledger(lambda pool: 60, on_shortfall=told.append)
    share = ledger.share("model", 50)
    assert share.hold("cache", 30)
    assert share.hold("cache", 50)
    assert not share.hold("cache", 51)  # more than the share
    assert not share.reserve("request", 1)
    assert share.hold("cache", 20)
    assert share.reserve("request", 30)
    share.resize(100)
    assert not share.hold("cache", 31)  # more than the machine
    assert share.hold("cache", 0)
    assert share.reservations() == {"request": 30}
    assert told == []
    share.close()
    assert not share.hold("cache", 1)


def test_many_misses_make_one_flush_that_is_told():
    told = threading.Event()
    flushes: list[float] = []
    readings = FixedReadings(1000, 600, cached_bytes=500, on_clear=lambda: flushes.append(time.monotonic()))
    reclaimer = Reclaimer(readings, told.set)
    for _ in range(50):
        reclaimer.want(10)
    assert told.wait(10)
    readings.cached_bytes = 500
    reclaimer.want(10)
    deadline = time.monotonic() + 5
    while len(flushes) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    reclaimer.close()
    assert len(flushes) == 2
    assert flushes[1] - flushes[0] >= 1.0


def test_a_cache_holds_as_much_as_fits_and_a_refusal_changes_nothing():
    shortfalls = []
    ledger = Ledger(lambda pool: 100, on_shortfall=shortfalls.append)
    assert ledger.hold("queue", 60, "host")
    assert ledger.hold("queue", 90, "host")
    assert not ledger.hold("queue", 101, "host")
    assert ledger.outstanding_bytes("host") == 90
    assert ledger.hold("queue", 0, "host")
    assert not ledger.reservations()
    assert not shortfalls
