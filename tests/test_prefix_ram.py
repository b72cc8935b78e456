"""The RAM tier: what stays, what goes first, and what holds whatever is done to it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darkbloom_core.contracts import PartKey
from darkbloom_core.prefix import RamTier

MIB = 2**20


def name(chain, block):
    return f"{chain}/{block}".encode()


def full(chain, block):
    return PartKey(name(chain, block), "full")


def window(chain, block):
    return PartKey(name(chain, block), "window")


class Tier(RamTier):
    """The tier with the keys of made-up chains."""

    def put(self, key, size=10, saves=1.0):
        chain, block = key.block.decode().split("/")
        parent = name(chain, int(block) - 1) if int(block) else None
        return self.keep(key, f"item of {key}", size, saves_milliseconds=saves, parent=parent)

    def put_chain(self, chain, blocks, size=10):
        return [self.put(full(chain, block), size) for block in range(blocks)]

    def has(self, *keys):
        return [self.probe(key) is not None for key in keys]


# --- use and pins -------------------------------------------------------------------------


def test_what_is_kept_is_found_with_its_size_and_its_item():
    tier = Tier(100)
    assert tier.put(full("a", 0), 7)
    assert tier.probe(full("a", 0)) == 7
    with tier.pin([full("a", 0)]) as pins:
        assert pins.items == (f"item of {full('a', 0)}",)
    assert pins.items == ()
    assert tier.probe(full("a", 1)) is None


def test_there_are_never_more_parts_than_there_may_be_however_small_they_are():
    tier = Tier(10**6, most_parts=3)
    assert tier.put_chain("a", 3, size=1) == [True] * 3
    assert tier.put(full("b", 0), 1)
    assert tier.has(full("a", 0), full("a", 1), full("a", 2), full("b", 0)) == [True, True, False, True]
    assert tier.parts == tier.stats().parts == 3
    assert not Tier(10**6, most_parts=0).put(full("a", 0), 1)


def test_pinning_is_all_or_nothing():
    tier = Tier(20)
    tier.put(full("a", 0))
    assert tier.pin([full("a", 0), full("a", 1)]) is None
    assert tier.stats().detail["pinned_bytes"] == 0
    assert tier.resize(0) == 0


def test_a_pinned_part_outlives_everything_and_goes_when_it_is_let_go():
    tier = Tier(20)
    tier.put(full("a", 0))
    pins = tier.pin([full("a", 0)])
    again = tier.pin([full("a", 0)])
    assert tier.resize(0) == 10
    pins.release()
    pins.release()
    assert tier.stats().bytes_used == 10, "pinned twice"
    again.release()
    assert tier.stats().bytes_used == 0


def test_a_part_that_cannot_fit_is_refused_and_drops_nothing():
    tier = Tier(30)
    tier.put_chain("a", 3)
    assert not tier.put(full("b", 0), 31)
    assert not tier.put(full("b", 0), 0)
    assert tier.stats().parts == 3


# --- what goes first ----------------------------------------------------------------------


def test_a_block_never_goes_before_those_that_build_on_it():
    tier = Tier(50)
    tier.put_chain("a", 5)
    tier.resize(30)
    assert tier.has(*(full("a", block) for block in range(5))) == [True, True, True, False, False]


def test_a_prompt_longer_than_the_budget_keeps_its_beginning():
    tier = Tier(50)
    assert tier.put_chain("a", 8) == [True] * 5 + [False] * 3
    assert tier.stats().parts == 5


def test_a_block_whose_beginning_is_not_held_is_refused():
    tier = Tier(50)
    assert not tier.put(full("a", 1))


def test_what_was_used_lately_stays():
    tier = Tier(30)
    for chain in "abc":
        tier.put(full(chain, 0))
    tier.pin([full("a", 0)]).release()
    tier.put(full("d", 0))
    assert tier.has(*(full(chain, 0) for chain in "abcd")) == [True, False, True, True]


def test_what_saves_more_for_each_byte_stays_longer():
    tier = Tier(30)
    tier.put(full("a", 0), 10, saves=5.0)
    tier.put(full("b", 0), 10, saves=1.0)
    tier.put(full("c", 0), 10, saves=2.0)
    tier.put(full("d", 0), 10, saves=2.0)
    assert tier.has(*(full(chain, 0) for chain in "abcd")) == [True, False, True, True]


def test_what_nobody_asks_for_goes_in_the_end_whatever_it_is_worth():
    tier = Tier(30)
    tier.put(full("dear", 0), 10, saves=50.0)
    for count in range(200):
        tier.put(full(f"c{count}", 0), 10, saves=1.0)
    assert tier.probe(full("dear", 0)) is None


def test_a_short_prefix_that_is_used_again_and_again_stays():
    tier = Tier(100)
    tier.put_chain("hot", 2)
    for count in range(300):
        tier.pin([full("hot", 0), full("hot", 1)]).release()
        tier.put_chain(f"long{count}", 6)
    assert all(tier.has(full("hot", 0), full("hot", 1)))


# --- two classes --------------------------------------------------------------------------


def test_a_flood_of_full_parts_leaves_windows_their_share_and_the_reverse():
    tier = Tier(100)
    for block in range(10):
        tier.put(window("a", block))
    assert tier.stats().detail["window_bytes"] == 100, "what the other leaves may be used"
    tier.put_chain("a", 30)
    assert tier.stats().detail["window_bytes"] == 50
    assert tier.stats().detail["full_bytes"] == 50
    for block in range(100):
        tier.put(window("b", block), saves=1000.0)
    assert tier.stats().detail["full_bytes"] == 50


def test_a_class_below_its_share_takes_back_what_the_other_borrowed_however_much_that_is_worth():
    tier = Tier(100)
    for block in range(9):
        tier.put(window("a", block), saves=1000.0)
    for chain in "abcde":
        tier.put(full(chain, 0), saves=0.1)
    assert tier.has(*(full(chain, 0) for chain in "abcde")) == [True] * 5


def test_a_pinned_window_stays_too():
    tier = Tier(20)
    tier.put(window("a", 0))
    with tier.pin([window("a", 0)]):
        for block in range(1, 5):
            tier.put(window("a", block))
        assert tier.resize(5) == 10
        assert tier.has(window("a", 0)) == [True]
    assert tier.has(window("a", 0)) == [False]


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.sampled_from(("full", "window", "state")),
            st.sampled_from("abc"),
            st.integers(0, 4),
            st.integers(1, 40),
            st.floats(0, 10),
        ),
        st.tuples(st.just("pin"), st.sampled_from("abc"), st.integers(1, 4)),
        st.tuples(st.just("pin tail"), st.sampled_from("abc"), st.integers(0, 4)),
        st.tuples(st.just("release"), st.integers(0, 5)),
        st.tuples(st.just("resize"), st.integers(0, 200)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=100)
@given(operations)
def test_whatever_is_done_what_is_always_true_stays_true(steps):
    tier, pins = Tier(100), []
    limit = 100

    def used():
        found = {"full": 0, "tail": 0}
        for key, held in tier._held.items():
            found["full" if key.part == "full" else "tail"] += held.size_bytes
        return found

    for step in steps:
        before = used()
        pinned = {key for key, held in tier._held.items() if held.pins}
        match step:
            case ("put", part, chain, block, size, saves):
                key = PartKey(name(chain, block), part)
                assert tier.put(key, size, saves) == (tier.probe(key) is not None)
                other = "tail" if part == "full" else "full"
                assert used()[other] >= min(before[other], limit * 0.5), "the other class lost its share"
            case ("pin", chain, blocks):
                found = tier.pin([full(chain, block) for block in range(blocks)])
                if found is not None:
                    pins.append(found)
            case ("pin tail", chain, block):
                found = tier.pin([window(chain, block)])
                if found is not None:
                    pins.append(found)
            case ("release", index) if index < len(pins):
                pins.pop(index).release()
                pinned = set()
            case ("resize", limit):
                assert tier.resize(limit) == sum(used().values())
        held = tier._held
        assert pinned <= held.keys()
        for key in held:
            chain, block = key.block.decode().split("/")
            if key.part == "full" and int(block):
                assert full(chain, int(block) - 1) in held, "a beginning is missing"
        assert tier.stats().bytes_used == sum(used().values())
        if sum(used().values()) > limit:
            needed = {
                full(key.block.decode().split("/")[0], block)
                for key, one in held.items()
                if one.pins
                if key.part == "full"
                for block in range(int(key.block.decode().split("/")[1]) + 1)
            }
            assert held.keys() <= needed | {key for key, one in held.items() if one.pins}, (
                "over the budget though something could go"
            )
    for one in pins:
        one.release()
    assert tier.stats().detail["pinned_bytes"] == 0
    assert tier.resize(0) == 0
    assert tier._held == {}


def test_many_threads_leave_no_pin_and_no_byte_behind():
    tier = Tier(500)
    faults = []

    def work(chain):
        try:
            for count in range(300):
                tier.put_chain(chain, 4)
                pins = tier.pin([full(chain, block) for block in range(3)])
                tier.resize(300 + count % 7 * 50)
                if pins is not None:
                    assert len(pins.items) == 3
                    pins.release()
        except BaseException as fault:  # shown by the main thread
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(chain,)) for chain in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert faults == []
    assert tier.stats().detail["pinned_bytes"] == 0
    assert tier.resize(0) == 0


def test_counts_are_those_of_what_happened():
    tier = Tier(20)
    tier.put_chain("a", 3)
    tier.pin([full("a", 0)]).release()
    tier.pin([full("b", 0)])
    tier.resize(10)
    stats = tier.stats()
    assert (stats.parts, stats.bytes_used, stats.bytes_limit) == (1, 10, 10)
    assert (stats.offered, stats.dropped, stats.hits, stats.misses, stats.evicted) == (3, 1, 1, 1, 1)


def test_the_table_of_what_may_go_does_not_grow_with_use():
    tier = Tier(100)
    tier.put_chain("a", 3)
    for _ in range(5000):
        tier.pin([full("a", 2)]).release()
    assert len(tier._heaps["full"]) < 200


@pytest.mark.parametrize("limit", [0, -1])
def test_a_budget_of_nothing_keeps_nothing(limit):
    tier = Tier(limit)
    assert not tier.put(full("a", 0), 1)
    assert tier.stats().bytes_limit == 0
