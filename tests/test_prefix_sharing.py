"""Requests in flight with a common beginning: it is computed once, and nobody waits for nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darkbloom_core.contracts import LayerKind
from darkbloom_core.prefix import (
    PART_NAMES,
    Costs,
    PartLayout,
    PrefillSharing,
    TailPolicy,
    block_hashes,
    plan_reuse,
)

FULL = LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8)
COSTS = Costs(prefill_milliseconds_per_token=1.0, fetch_milliseconds_per_byte={"ram": 0.0})


def sliding(window):
    return LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8, window=window)


class Flight:
    """An engine without arrays: every step each request that need not wait computes one chunk."""

    def __init__(self, window=300, grid=256, keeps=True):
        self.layout = PartLayout([FULL, sliding(window)], grid)
        self.sharing = PrefillSharing()
        self.policy = TailPolicy()
        self.keeps = keeps
        self.cache = set()
        self.grid = grid
        self.live = {}
        self.computed = {}

    def arrive(self, request, tokens):
        cuts = [*range(self.grid, len(tokens), self.grid), len(tokens)]
        self.live[request] = {
            "cuts": cuts,
            "parts": self.layout.of(cuts),
            "names": block_hashes(tokens, cuts, b"root"),
            "at": None,
        }
        self.computed[request] = 0
        self._begin(request)

    def _begin(self, request):
        one = self.live[request]
        names, parts = one["names"], one["parts"]
        plan = plan_reuse(
            parts,
            lambda block, part: "ram" if (names[block], part) in self.cache else None,
            COSTS,
        )
        if plan.missed_boundary is not None:
            self.policy.missed(names[parts.count(plan.missed_boundary) - 1])
        target = self.sharing.enter(request, names, parts, plan.tokens, self.policy.to_keep(parts, names))
        one["at"] = plan.tokens if target is None else None
        return target

    def end(self, request):
        del self.live[request]
        self.sharing.leave(request)

    def step(self):
        """False if nobody could do anything."""
        moved = False
        for request in [*self.live]:
            one = self.live[request]
            if one["at"] is None:
                if self.sharing.waits(request):
                    continue
                moved = True
                if self._begin(request) is not None:
                    continue
            moved = True
            self._chunk(request, one)
        return moved

    def _chunk(self, request, one):
        end = next(cut for cut in one["cuts"] if cut > one["at"])
        self.computed[request] += end - one["at"]
        if end % self.grid == 0:
            tails = self.sharing.tails(request)
            for block in range(one["at"] // 256, end // 256):
                for part in PART_NAMES:
                    if self.keeps and (part == "full" or (block, part) in tails):
                        self.cache.add((one["names"][block], part))
            self.sharing.computed(request, end, is_kept=self.keeps)
        one["at"] = end
        if end == one["cuts"][-1]:
            self.end(request)

    def run(self):
        for _ in range(10_000):
            if not self.live:
                assert self.sharing.is_empty
                return
            assert self.step(), f"nobody moves: {[*self.live]}"
        pytest.fail("no end")


def test_two_equal_prompts_that_arrive_together_are_prefilled_once():
    flight = Flight()
    prompt = [*range(8000)]
    flight.arrive("a", prompt)
    flight.arrive("b", prompt)
    assert flight.sharing.waits("b")
    assert not flight.sharing.waits("a")
    flight.run()
    assert flight.computed == {"a": 8000, "b": 8000 - 7936}


@pytest.mark.parametrize("window", [100, 256, 300, 1024])
@pytest.mark.parametrize("grid", [256, 512])
def test_a_common_beginning_is_computed_once_for_many(window, grid):
    flight = Flight(window, grid)
    for user in range(4):
        flight.arrive(user, [*range(3000), *[9000 + user] * 700])
    flight.run()
    common = 3000 // grid * grid
    assert flight.computed == {0: 3700, **dict.fromkeys((1, 2, 3), 3700 - common)}


def test_one_that_comes_late_meets_the_other_as_far_as_its_windows_are_still_to_be_computed():
    flight = Flight(window=1024)
    flight.arrive("a", [*range(6000)])
    for _ in range(12):
        flight.step()
    flight.arrive("b", [*range(3500), *range(9000, 9100)])
    assert not flight.sharing.waits("b"), "the windows at 3328 begin before what is computed: they are lost"
    flight.arrive("c", [*range(4500), *range(9000, 9100)])
    assert flight.sharing.waits("c")
    flight.run()
    assert flight.computed["c"] == 4600 - 4352


def test_when_the_first_is_cancelled_the_next_goes_on_where_it_got_to():
    flight = Flight()
    prompt = [*range(4000)]
    for request in "abc":
        flight.arrive(request, prompt)
    for _ in range(8):
        flight.step()
    flight.end("a")
    flight.run()
    assert flight.computed["b"] + flight.computed["c"] <= 4000 + 256


def test_nobody_waits_for_one_whose_parts_are_not_kept():
    flight = Flight(keeps=False)
    for request in "ab":
        flight.arrive(request, [*range(2000)])
    flight.step()
    flight.step()
    assert not flight.sharing.waits("b")
    flight.run()
    assert flight.computed == {"a": 2000, "b": 2000}


def test_one_that_did_not_keep_a_part_for_others_still_keeps_its_own():
    flight = Flight(keeps=False)
    flight.arrive("a", [*range(2000)])
    flight.step()
    assert flight.sharing.tails("a")


def test_other_scopes_and_other_prompts_do_not_wait():
    flight = Flight()
    flight.arrive("a", [*range(2000)])
    flight.arrive("b", [1, *range(1999)])
    flight.arrive("c", [*range(200)])
    assert not any(flight.sharing.waits(request) for request in "bc")


def test_whoever_has_more_in_the_cache_than_another_has_computed_does_not_wait():
    flight = Flight()
    cuts = [*range(256, 2000, 256), 2000]
    names, parts = block_hashes(range(2000), cuts, b"root"), flight.layout.of(cuts)
    assert flight.sharing.enter("slow", names, parts, 0, ()) is None
    assert flight.sharing.enter("fast", names, parts, 1024, ()) is None


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**20), st.sampled_from((100, 300, 1024)), st.sampled_from((256, 512)), st.booleans())
def test_whatever_comes_and_goes_all_end_and_nothing_is_left(seed, window, grid, keeps):
    chance = random.Random(seed)
    flight = Flight(window, grid, keeps)
    stems = [[*range(chance.randrange(3000))], [*range(1500), *range(7000, 8000)]]
    for count in range(20):
        if chance.random() < 0.5:
            flight.arrive(count, [*chance.choice(stems), *[chance.randrange(3)] * chance.randrange(1, 600)])
        elif flight.live and chance.random() < 0.3:
            flight.end(chance.choice([*flight.live]))
        else:
            flight.step()
        if chance.random() < 0.2:
            flight.cache -= set(chance.sample(sorted(flight.cache), len(flight.cache) // 2))
        for request in flight.live:
            if flight.sharing.waits(request):
                leader, _ = flight.sharing._waiting[request]
                assert not flight.sharing.waits(leader)
    flight.run()
