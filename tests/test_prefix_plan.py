"""The planner against an oracle that knows nothing but tokens: is every position that attention needs there?"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darkbloom_core.contracts import LayerKind, MediaSpan
from darkbloom_core.engine._scheduler import chunk_end
from darkbloom_core.prefix import PART_NAMES, Costs, PartLayout, plan_reuse
from darkbloom_core.prefix._keeping import last_boundaries
from darkbloom_core.prefix._plan import PAYING_SHARE

FULL = LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8)
RECURRENT = LayerKind(state=((4,),))
FREE = Costs(prefill_milliseconds_per_token=1.0, fetch_milliseconds_per_byte={"ram": 0.0, "disk": 0.0})


def sliding(window):
    return LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8, window=window)


def cuts_of(length, grid, spans=()):
    cuts = []
    while not cuts or cuts[-1] < length:
        cuts.append(chunk_end(cuts[-1] if cuts else 0, length, grid, spans))
    return cuts


@st.composite
def cases(draw):
    """Layers, grid, prompt with spans, and which parts are where: mostly there, some missing."""
    windows = st.sampled_from((1, 128, 256, 300, 512, 1024))
    layer = st.one_of(st.just(FULL), st.builds(sliding, windows), st.just(RECURRENT))
    layers = draw(st.lists(layer, min_size=1, max_size=5))
    if layers[0] == FULL and draw(st.booleans()):
        layers.append(LayerKind(q_heads=4, source=0))
    grid = draw(st.sampled_from((256, 512)))
    length = draw(st.integers(1, 3000))
    spans, at = [], 0
    while at < length - 1 and len(spans) < 3 and draw(st.booleans()):
        start = draw(st.integers(at, length - 1))
        at = draw(st.integers(start + 1, min(length, start + 700)))
        spans.append(MediaSpan(start, at - start, len(spans)))
    chance = random.Random(draw(st.integers(0, 2**20)))
    missing = draw(st.sampled_from((0.0, 0.02, 0.1, 0.5)))
    parts = PartLayout(layers, grid).of(cuts_of(length, grid, tuple(spans)))
    there = {
        (block, part): chance.choice(("ram", "disk"))
        for block in range(len(parts.blocks))
        for part in PART_NAMES
        if chance.random() >= missing
    }
    return tuple(layers), parts, there


def is_complete(boundary, layers, parts, there):
    """Whether the parts in ``there`` hold all that a row holds after ``boundary`` tokens."""
    held, states = set(), set()
    for block, part in there:
        if parts.blocks[block].end > boundary:
            continue
        for piece in parts.pieces(block, part):
            if part == "state":
                if parts.blocks[block].end == boundary:
                    states.add(piece.layer)
                continue
            first = parts.blocks[block].start + piece.first_token
            if piece.name == "k":
                held |= {(piece.layer, position) for position in range(first, first + piece.tokens)}
    for index, layer in enumerate(layers):
        if layer.source is not None:
            continue
        if layer.state:
            if index not in states:
                return False
            continue
        start = 0 if layer.window is None else max(0, boundary - layer.window)
        if any((index, position) not in held for position in range(start, boundary)):
            return False
    return True


@settings(deadline=None, max_examples=150)
@given(cases())
def test_the_plan_is_the_longest_that_the_oracle_finds(case):
    layers, parts, there = case
    plan = plan_reuse(parts, lambda block, part: there.get((block, part)), FREE)
    possible = [cut for cut in parts.boundaries if is_complete(cut, layers, parts, there)]
    assert plan.tokens == max(possible, default=0)
    assert (plan.reason == "hit") == (plan.tokens > 0)
    fetched = {(one.block, one.part): one.place for one in plan.fetches}
    assert len(fetched) == len(plan.fetches)
    assert fetched.items() <= there.items()
    if plan.tokens:
        assert is_complete(plan.tokens, layers, parts, fetched)
    assert all(one.size_bytes == parts.part_bytes(one.block, one.part) > 0 for one in plan.fetches)


@settings(deadline=None, max_examples=40)
@given(cases())
def test_nothing_is_fetched_that_is_not_needed(case):
    layers, parts, there = case
    plan = plan_reuse(parts, lambda block, part: there.get((block, part)), FREE)
    fetched = {(one.block, one.part): one.place for one in plan.fetches}
    for one in [*fetched][-6:]:
        rest = {key: place for key, place in fetched.items() if key != one}
        assert not is_complete(plan.tokens, layers, parts, rest)


@settings(deadline=None)
@given(cases(), st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 300))
def test_a_hit_that_is_taken_pays_and_a_longer_one_would_not(case, ram, disk, fixed):
    _, parts, there = case
    costs = Costs(
        prefill_milliseconds_per_token=1.0,
        fetch_milliseconds_per_byte={"ram": ram, "disk": disk},
        hit_milliseconds=fixed,
    )

    def where(block, part):
        return there.get((block, part))

    def spent(boundary):
        needed = [(block, "full") for block in range(parts.count(boundary)) if parts.needs_full(block)]
        needed += parts.needs_at(boundary)
        if any(one not in there for one in needed):
            return None
        return fixed + sum(
            parts.part_bytes(*one) * costs.fetch_milliseconds_per_byte[there[one]] for one in needed
        )

    plan = plan_reuse(parts, where, costs)
    for boundary in parts.boundaries:
        cost = spent(boundary)
        if boundary == plan.tokens:
            assert cost == pytest.approx(plan.fetch_milliseconds)
            assert plan.saved_milliseconds == boundary
            assert plan.fetch_milliseconds <= PAYING_SHARE * boundary
        elif boundary > plan.tokens:
            assert cost is None or PAYING_SHARE * boundary <= cost * (1 + 1e-9)


LAYERS = (FULL, sliding(300))


def plan(length, there, layers=LAYERS, grid=256, costs=FREE, spans=()):
    parts = PartLayout(layers, grid).of(cuts_of(length, grid, spans))
    return plan_reuse(parts, lambda block, part: there.get((block, part)), costs)


def everything(blocks):
    return {(block, part): "ram" for block in range(blocks) for part in PART_NAMES}


def test_at_least_one_token_is_left_to_compute():
    assert plan(1024, everything(4)).tokens == 768
    assert plan(1025, everything(4)).tokens == 1024


def test_a_repeated_prompt_reuses_all_but_its_last_chunk():
    for length in range(257, 3000, 37):
        for grid in (256, 512):
            found = plan(length, everything(12), grid=grid)
            assert found.tokens >= length - 1 - grid or length - 1 < grid


def test_reuse_never_ends_inside_a_picture():
    spans = (MediaSpan(500, 600, 0),)
    assert plan(2000, everything(1), spans=spans).tokens == 256
    assert plan(2000, everything(2), spans=spans).tokens == 500
    assert plan(2000, everything(4), spans=spans).tokens == 500
    assert plan(2000, everything(5), spans=spans).tokens == 1100


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 700)), max_size=30),
    st.integers(1, 600),
    st.integers(1, 900),
    st.sampled_from((256, 512)),
)
def test_what_goes_on_from_a_prompt_with_pictures_computes_at_most_its_last_chunk_again(
    pictures, tail, more, grid
):
    """However densely pictures stand: reuse ends at the last chunk end that the longer prompt has, too."""
    spans, at = [], 0
    for number, (text, soft) in enumerate(pictures):
        spans.append(MediaSpan(at + text, soft, number))
        at += text + soft
    length = at + tail
    before, after = (cuts_of(total, grid, tuple(spans)) for total in (length, length + more))
    assert before[:-1] == after[: len(before) - 1]
    layout = PartLayout(LAYERS, grid)
    kept, parts = layout.of(before), layout.of(after)
    assert kept.boundaries == parts.boundaries[: len(before) - 1]
    common = kept.count(kept.lines[-1]) if kept.lines else 0
    assert kept.blocks[:common] == parts.blocks[:common]
    last = last_boundaries(kept.lines)
    there = {(block, "full"): "ram" for block in range(common)}
    there |= {one: "ram" for line in last for one in kept.needs_at(line)}
    found = plan_reuse(parts, lambda block, part: there.get((block, part)), FREE)
    assert found.tokens == max(last, default=0) == ([0, *before[:-1]][-1] if length % grid else length)
    assert last == sorted(last)
    assert all(other - one >= 256 for one, other in pairwise(last))


def test_a_boundary_whose_window_parts_are_missing_is_reported():
    there = everything(7)
    for block in (5, 6):
        del there[block, "window"]
    found = plan(2000, there)
    assert (found.tokens, found.missed_boundary) == (1280, 1792)
    for block in range(5):
        del there[block, "window"]
    found = plan(2000, there)
    assert (found.tokens, found.reason, found.missed_boundary) == (0, "window", 1792)


def test_the_reason_of_a_miss_is_told():
    dear = Costs(prefill_milliseconds_per_token=1.0, fetch_milliseconds_per_byte={"ram": 1.0})
    assert plan(256, everything(1)).reason == "short"
    assert plan(2000, {}).reason == "absent"
    declined = plan(2000, everything(7), costs=dear)
    assert (declined.reason, declined.declined_places) == ("cost", {"ram"})
    taken = plan(2000, everything(7))
    assert (taken.missed_boundary, taken.declined_places) == (None, frozenset())


def test_what_the_longest_hit_would_have_needed_is_what_was_declined():
    there = {**everything(4), **{(block, part): "disk" for block in range(4, 7) for part in PART_NAMES}}
    dear = Costs(prefill_milliseconds_per_token=1.0, fetch_milliseconds_per_byte={"ram": 1.0, "disk": 1.0})
    assert plan(2000, there, costs=dear).declined_places == {"ram", "disk"}
    assert plan(1100, there, costs=dear).declined_places == {"ram"}


def test_a_dear_tail_leaves_the_cheap_beginning():
    there = {**everything(4), **{(block, part): "disk" for block in range(4, 7) for part in PART_NAMES}}
    costs = Costs(prefill_milliseconds_per_token=1.0, fetch_milliseconds_per_byte={"ram": 0.0, "disk": 1.0})
    found = plan(2000, there, costs=costs)
    assert (found.tokens, found.declined_places) == (1024, {"disk"})


@pytest.mark.parametrize(
    ("share", "taken"), [(PAYING_SHARE - 0.01, 1792), (PAYING_SHARE + 0.01, 0), (0.99, 0)]
)
def test_a_hit_that_would_hardly_pay_is_not_taken(share, taken):
    """Both times are estimates, and a hit must never be slower than none."""
    costs = Costs(
        prefill_milliseconds_per_token=1.0,
        fetch_milliseconds_per_byte={"ram": 0.0},
        hit_milliseconds=1792 * share,
    )
    assert plan(2000, everything(7), costs=costs).tokens == taken


def test_the_bytes_to_reserve_are_those_of_all_fetches():
    found = plan(1025, everything(4))
    block = FULL.bytes(256)
    windows = (
        sliding(300).bytes(256) * 2
    )  # what a window reaches of an older block is kept whole on this grid
    assert found.size_bytes == 4 * block + windows
