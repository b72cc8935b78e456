"""Prefix reuse of prompts with pictures: ends of chunks off the grid, the bits of a cold request, and what is shared.

| promise | test |
|---|---|
| warm runs the rest of the cold list of chunks, keys and masks, and has its bits | ``test_a_warm_request_...`` |
| a follow-up question about thirty pictures computes none of them again | ``test_a_follow_up_...`` |
| another picture of the same size in the same place shares nothing from its chunk on | ``test_another_picture_...`` |
| tiers below memory hold such parts, too | ``test_a_tier_below_...`` |
| equal conversations that arrive together | ``test_two_equal_conversations_...`` |
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import request
from toy_family import ToyModel, ToySeam, full, recurrent, text_of, toy_picture, window
from warm import BytesTier, Warm, bits_equal, noise

from darkbloom_core.contracts import MediaSpan, Prompt
from darkbloom_core.engine._reuse import chunk_ends

LAYERS = [
    window(300, spans="window"),
    full(),
    full(source=1),
    window(100, spans="window"),
    full(spans="window"),
]


def conversation(parts, seed=0):
    """Ids, spans and pictures of a prompt of (text tokens, soft tokens) in turn."""
    ids, spans, pictures = [], [], []
    for number, (text, soft) in enumerate(parts):
        ids += noise(text, 1000 * seed + number)
        if soft:
            numbers = np.random.default_rng(1000 * seed + number).random(soft)
            spans.append(MediaSpan(len(ids), soft, len(spans)))
            pictures.append(toy_picture(numbers))
            ids += [0] * soft
    return ids, {"spans": tuple(spans), "pictures": tuple(pictures)}


def ends(ids, media, grid=256):
    return chunk_ends(len(ids), grid, media["spans"])


def seeing(layers=LAYERS, seed=0, **more):
    return ToyModel(layers, seed=seed, vision=ToySeam(), **more)


@st.composite
def layer_lists(draw):
    """Windows smaller, equal and larger than a block, that see pictures both ways or not; full, recurrent, borrowing."""
    kinds = [full(), recurrent(), full(spans="window")]
    kinds += [window(size, spans=spans) for size in (1, 100, 256, 300, 600) for spans in ("causal", "window")]
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    if layers[0].source is None and not layers[0].state and draw(st.booleans()):
        layers.append(full(source=0, window=layers[0].window, spans=layers[0].spans))
    return layers


@settings(deadline=None, max_examples=4)
@given(
    layer_lists(),
    st.sampled_from((256, 512)),
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 280)), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(1, 200),
    st.integers(0, 2**16),
)
def test_a_warm_request_with_pictures_runs_the_rest_of_what_a_cold_one_runs_and_has_its_bits(
    layers, grid, parts, tail, more, seed
):
    ids, media = conversation([*parts, (tail, 0)], seed)
    grown = [*ids, *noise(more, seed)]
    with Warm(seeing(layers, seed), grid) as warm:
        for prompt, before in ((ids, 0), (ids, len(ids)), (grown, len(ids))):
            ran, cold = warm.run(prompt, 2, **media), warm.run_cold(prompt, 2, **media)
            assert cold.cached == 0
            cuts = [start + length for start, length in cold.chunks]
            assert [start for start, _ in cold.chunks] == [0, *cuts[:-1]]
            assert set(ends(prompt, media, grid)) <= set(cuts), "the others are ends of parts"
            assert ran.chunks == [chunk for chunk in cold.chunks if chunk[0] >= ran.cached]
            assert ran.attended == cold.attended[len(cold.attended) - len(ran.attended) :]
            if before:
                assert ran.cached >= [0, *ends(ids, media, grid)][-2]
            assert ran.tokens == cold.tokens
            assert bits_equal(ran, cold)
        assert warm.is_at_rest()


THIRTY = [(7, 30)] * 30
"""Thirty pictures, so close together that hardly a line of the grid is outside of one."""


@pytest.fixture(scope="module")
def warm():
    with Warm(seeing(), engine={"picture_bytes": 1 << 20}) as engine:
        yield engine


def test_a_follow_up_question_about_thirty_pictures_computes_none_of_them_again(warm):
    ids, media = conversation([*THIRTY, (20, 0)])
    first = warm.run(ids, 2, **media)
    assert first.cached == 0
    cuts = ends(ids, media)
    assert sum(cut % 256 == 0 for cut in cuts) < len(cuts) / 2, "pictures move chunk ends off the grid"
    question = [*ids, *first.tokens, *noise(40, 77)]
    warm.model.vision.looks.clear()
    ran, cold = warm.run(question, 2, **media), warm.run_cold(question, 2, **media)
    assert ran.cached == cuts[-2] >= len(ids) - 256
    assert ran.chunks == [chunk for chunk in cold.chunks if chunk[0] >= ran.cached]
    assert len(ran.chunks) == 1 + len(cold.chunks) - len(cuts)
    assert bits_equal(ran, cold)
    assert warm.model.vision.looks == [], "nor does the tower look again"
    assert warm.is_at_rest()


def test_another_picture_of_the_same_size_in_the_same_place_shares_nothing_from_its_chunk_on(warm):
    ids, media = conversation([(50, 20), (230, 20), (230, 0)], seed=5)
    cuts = ends(ids, media)
    warm.run(ids, 1, **media)
    for number, span in enumerate(media["spans"]):
        pictures = list(media["pictures"])
        pictures[number] = toy_picture(np.full(20, (number + 1) / 7))
        other = {**media, "pictures": tuple(pictures)}
        ran, cold = warm.run(ids, 2, **other), warm.run_cold(ids, 2, **other)
        assert ran.cached == max([0, *(cut for cut in cuts if cut <= span.start)])
        assert bits_equal(ran, cold)
    assert warm.run(ids, 1, **media).cached == cuts[-2]


def test_pictures_that_touch_are_known_by_what_they_see(warm):
    """The first is in a block of its own, and is computed out of the second one's tokens, too."""
    ids, media = conversation([(100, 256), (0, 60), (200, 0)], seed=6)
    for number in range(2):
        pictures = (media["pictures"][0], toy_picture(np.full(60, (number + 1) / 7)))
        ran, cold = (
            run(ids, 2, spans=media["spans"], pictures=pictures) for run in (warm.run, warm.run_cold)
        )
        assert bits_equal(ran, cold)
        again = warm.run(ids, 2, spans=media["spans"], pictures=pictures)
        assert again.cached == ends(ids, media)[-2]
        assert bits_equal(again, cold)


def test_a_tier_below_memory_gives_back_parts_of_prompts_with_pictures():
    parts: dict = {}

    def tier():
        return {"below": BytesTier(parts)}

    ids, media = conversation([*THIRTY[:15], (20, 0)], seed=7)
    cuts = ends(ids, media)
    with Warm(seeing(), open_tiers=tier) as first:
        cold = first.run(ids, 2, **media)
        first.reuse._spill.wait()
    with Warm(seeing(), open_tiers=tier) as second:
        for _ in range(2):  # from below, then out of memory
            ran = second.run(ids, 2, **media)
            assert ran.cached == cuts[-2]
            assert bits_equal(ran, cold)
        assert second.is_at_rest()


def test_two_equal_conversations_that_arrive_together_are_prefilled_once(warm):
    ids, media = conversation([*THIRTY[:15], (20, 0)], seed=8)
    prompt = Prompt(tuple(ids), media["spans"])
    before = warm.engine.status().prefill_tokens

    asked = replace(request("first", ids, 2, pictures=media["pictures"]), prompt=prompt)
    streams = [warm.engine.submit(each) for each in (asked, replace(asked, id="second"))]
    outputs = [list(stream) for stream in streams]
    assert text_of(outputs[0]) == text_of(outputs[1])
    last = len(ids) - ends(ids, media)[-2]
    assert warm.engine.status().prefill_tokens - before == len(ids) + last
