"""Pictures in a prompt: how they move the cuts of chunks, and who sees whom."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.contracts import LayerKind, MediaSpan
from darkbloom_core.engine._chunk import Chunk, ChunkBatch
from darkbloom_core.engine._kv import KvStore
from darkbloom_core.engine._scheduler import chunk_end
from darkbloom_core.engine._spans import picture_runs


def spans_of(parts):
    """Spans and the length of a prompt, from alternating numbers of text tokens and soft tokens."""
    place, spans = 0, []
    for number, (text, soft) in enumerate(parts):
        place += text
        spans.append(MediaSpan(place, soft, number))
        place += soft
    return tuple(spans), place


PARTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=8)


@given(PARTS, st.integers(1, 40), st.integers(1, 20))
def test_chunks_cover_a_prompt_and_never_split_pictures_that_touch(parts, tail, grid):
    spans, length = spans_of(parts)
    length += tail
    start, runs = 0, picture_runs(spans)
    while start < length:
        end = chunk_end(start, length, grid, spans)
        assert start < end <= length
        assert not any(first < end < last for first, last in runs)
        if end - start > grid:  # only a picture that it begins with makes a chunk longer
            assert (start, end) in runs
        elif (
            end % grid and end != length
        ):  # only a picture makes one shorter, or ends a longer one off the grid
            assert any(end in run for run in runs)
        start = end


@given(PARTS, st.integers(1, 20))
def test_cuts_of_a_prompt_are_those_of_whatever_goes_on_from_it(parts, grid):
    """A later question about the same pictures finds the same chunks, but for the last one of before."""
    spans, length = spans_of(parts)
    cuts = {}
    for more in (5, 400):
        ends = [0]
        while ends[-1] < length + more:
            ends.append(chunk_end(ends[-1], length + more, grid, spans))
        cuts[more] = ends
    assert cuts[5][:-1] == cuts[400][: len(cuts[5]) - 1]


def test_spans_that_touch_are_one_picture():
    assert picture_runs(spans_of([(2, 3), (0, 4), (1, 5)])[0]) == ((2, 9), (10, 15))


def seen(start, length, window, both_ways, pictures):
    """The definition: ``window and (causal or same picture)``, in absolute positions."""
    history = start if window is None else min(start, window - 1)
    out = np.zeros((length, history + length), bool)
    for query in range(length):
        for key in range(history + length):
            at = key - history
            same = both_ways and any(first <= query < end and first <= at < end for first, end in pictures)
            inside = window is None or at > query - window
            out[query, key] = inside and (at <= query or same)
    return out


@pytest.mark.parametrize("window", [None, 3, 6, 50])
@pytest.mark.parametrize("start", [0, 2, 9])
@pytest.mark.parametrize("both_ways", [False, True])
def test_the_mask_is_the_references(window, start, both_ways):
    for pictures in ((), ((1, 2),), ((1, 5),), ((0, 4), (5, 11)), ((0, 12),)):
        mask = Chunk(start, 12, pictures).mask(window, both_ways=both_ways)
        expected = seen(start, 12, window, both_ways, pictures)
        if isinstance(mask, mx.array):
            assert (np.array(mask) == expected).all()
        else:
            assert mask == "causal"
            assert (expected == seen(start, 12, window, False, ())).all()


def test_text_keeps_its_symbolic_mask():
    """An explicit one is many times slower on some devices."""
    assert Chunk(9, 12).mask(None, both_ways=True) == "causal"
    assert Chunk(9, 12, ((3, 8),)).mask(None, both_ways=False) == "causal"
    assert Chunk(0, 12, ((3, 4),)).mask(50, both_ways=True) == "causal"
    assert Chunk(9, 1).mask(50, both_ways=True) is None


def test_only_layers_that_say_so_see_pictures_both_ways():
    """A later token of a picture changes what an earlier one becomes in a window layer, and not in a full one."""
    kind = {"q_heads": 1, "kv_heads": 1, "k_dim": 4, "v_dim": 4, "dtype": "float32"}
    layers = (LayerKind(window=6, spans="window", **kind), LayerKind(**kind), LayerKind(window=6, **kind))
    random = np.random.default_rng(4)
    q, k, v = (mx.array(random.standard_normal((1, 1, 8, 4)).astype(np.float32)) for _ in range(3))
    other = mx.concatenate([v[:, :, :6], v[:, :, 6:] + 1], axis=2)
    changed = []
    for index in range(len(layers)):
        outputs = []
        for values in (v, other):
            store = KvStore(layers, max_rows=1)
            batch = ChunkBatch(store, store.open_row(8, 9), 0, 8, (MediaSpan(3, 4, 0),))
            outputs.append(np.array(batch.caches[index].attend(q, k, values))[0, 0])
        changed.append(np.flatnonzero(np.abs(outputs[0] - outputs[1]).max(axis=-1) > 1e-6).tolist())
    assert changed == [[3, 4, 5, 6, 7], [6, 7], [6, 7]]
