"""KV rows against an oracle that runs the whole sequence at once without any cache."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_family import HIDDEN, ToyModel, full, recurrent, window

from darkbloom_core.engine import KvStore, lane_bytes, row_bytes, step_batch
from darkbloom_core.engine._kv import storage_tokens
from darkbloom_core.errors import UnsupportedCheckpoint

PATTERNS = {
    "full": [full(), full()],
    "window": [window(8), window(8)],
    "sinks": [window(8, sinks=True), full(sinks=True)],
    "mixed windows": [window(4), full(), window(16)],
    "borrowing": [window(8), full(), window(8, source=0), full(source=1)],
    "recurrent": [recurrent(), full(), recurrent()],
}


def logits_of_steps(model, store, rows, positions, ids):
    """Run one step for ``rows``; ``ids`` ``[B, L]``. Returns ``[B, L, V]``."""
    batch = step_batch(store, rows, positions, len(ids[0]))
    (hidden,) = model.run_layers(model.embed(mx.array(ids)), batch, 0, len(model.layers))
    count = hidden.shape[0] * hidden.shape[1]
    return np.array(model.logits(hidden.reshape(count, 1, HIDDEN))).reshape(len(ids), len(ids[0]), -1)


def close(actual, expected):
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks_then_single_tokens_equal_the_oracle(pattern, chunk):
    model = ToyModel(PATTERNS[pattern])
    ids = np.random.default_rng(0).integers(0, 64, 60).tolist()
    expected = model.oracle(ids)
    store = KvStore(model.layers, 2)
    row = store.open_row(40, 60)
    position = 0
    while position < 40:
        end = min(40, position + chunk)
        actual = logits_of_steps(model, store, [row], [position], [ids[position:end]])
        close(actual[0], expected[position:end])
        position = end
    for position in range(40, 60):
        actual = logits_of_steps(model, store, [row], [position], [[ids[position]]])
        close(actual[0], expected[position : position + 1])


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_rows_that_join_and_leave_at_random_see_only_themselves(pattern, data):
    model = ToyModel(PATTERNS[pattern])
    store = KvStore(model.layers, 4, data.draw(st.sampled_from([0, 32, 512])))
    seed = data.draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    live: list[tuple] = []
    for _ in range(12):
        if live and (len(live) == 4 or random.random() < 0.2):
            store.close_row(live.pop(random.integers(len(live)))[0])
        if len(live) < 4 and random.random() < 0.5:
            ids = random.integers(0, 64, random.integers(2, 40)).tolist()
            row = store.open_row(len(ids), 64)
            logits_of_steps(model, store, [row], [0], [ids])
            live.append((row, ids))
            live.sort(key=lambda one: one[0].lane)
        if not live:
            continue
        tokens = random.integers(0, 64, len(live)).tolist()
        positions = [len(ids) for _, ids in live]
        actual = logits_of_steps(model, store, [row for row, _ in live], positions, [[one] for one in tokens])
        for (_, ids), token, logits in zip(live, tokens, actual, strict=True):
            ids.append(token)
            close(logits[0], model.oracle(ids)[-1])


def fill(store, row, tokens):
    store.make_room(row, tokens)
    for position in range(tokens):
        row.buffers[0].write(0, mx.ones((1, 2, 1, 8)), mx.ones((1, 2, 1, 8)), position)


def test_a_full_layers_buffer_grows_by_doubling_up_to_the_reserved_length():
    store = KvStore([full()], 1)
    row = store.open_row(1, 2500)
    sizes = []
    for tokens in range(1, 2501):
        store.make_room(row, tokens)
        if not sizes or sizes[-1] != row.buffers[0].tokens:
            sizes.append(row.buffers[0].tokens)
            fill(store, row, tokens)
    assert sizes == [512, 1024, 2048, 2560]
    assert mx.all(row.buffers[0].view(0, 0, 2049)[0] == 1)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_row_that_outgrows_the_shared_slab_takes_its_tokens_along(pattern):
    model = ToyModel(PATTERNS[pattern])
    store = KvStore(model.layers, 3, shared_tokens=512)
    ids = np.random.default_rng(0).integers(0, 64, 530).tolist()
    other, row = store.open_row(4, 20), store.open_row(500, 530)
    logits_of_steps(model, store, [other], [0], [[1, 2, 3, 4]])
    logits_of_steps(model, store, [row], [0], [ids[:500]])
    expected = model.oracle(ids)
    assert row.is_shared
    for position in range(500, 530):
        actual = logits_of_steps(model, store, [row], [position], [[ids[position]]])
        close(actual[0], expected[position : position + 1])
    assert not row.is_shared
    close(logits_of_steps(model, store, [other], [4], [[5]])[0], model.oracle([1, 2, 3, 4, 5])[-1:])


def test_reserved_bytes_are_what_the_arrays_come_to():
    layers = [window(8), full(), full(source=1), recurrent()]
    store = KvStore(layers, 3)
    assert store.slab_bytes == 3 * lane_bytes(layers)
    assert store.allocated_bytes == store.slab_bytes
    row = store.open_row(10, 700)
    store.make_room(row, 700)
    assert store.allocated_bytes - store.slab_bytes == row_bytes(layers, 700)
    assert row_bytes(layers, 700) == 2 * 2 * 8 * 4 * storage_tokens(700)
    store.close_row(row)
    assert store.allocated_bytes == store.slab_bytes


def test_the_shared_slab_is_counted_and_a_short_row_adds_nothing():
    layers = [window(8), full()]
    store = KvStore(layers, 4, shared_tokens=512)
    assert store.slab_bytes == 4 * (lane_bytes(layers) + row_bytes(layers, 512))
    store.open_row(500, 512)
    assert store.allocated_bytes == store.slab_bytes


def test_lanes_are_reused_lowest_first():
    store = KvStore([window(8)], 3)
    rows = [store.open_row(1, 2) for _ in range(3)]
    assert [row.lane for row in rows] == [0, 1, 2]
    store.close_row(rows[1])
    store.close_row(rows[0])
    assert store.open_row(1, 2).lane == 0


def test_a_reused_lane_remembers_nothing():
    model = ToyModel([recurrent(), window(8)])
    store = KvStore(model.layers, 1)
    first = store.open_row(6, 10)
    logits_of_steps(model, store, [first], [0], [[1, 2, 3, 4, 5, 6]])
    store.close_row(first)
    actual = logits_of_steps(model, store, [store.open_row(3, 10)], [0], [[7, 8, 9]])
    close(actual[0], model.oracle([7, 8, 9]))


def test_what_the_backend_cannot_do_is_refused_when_the_store_is_built():
    with pytest.raises(UnsupportedCheckpoint, match="caps its attention scores"):
        KvStore([full(softcap=30.0)], 1)
    with pytest.raises(UnsupportedCheckpoint, match="borrows from layer 1"):
        KvStore([full(), full(source=1)], 1)
    with pytest.raises(UnsupportedCheckpoint, match="does not store the same span"):
        KvStore([window(8), full(source=0)], 1)


def test_a_family_that_attends_in_another_dtype_than_described_is_told_so():
    store = KvStore([full(dtype="bfloat16")], 1)
    batch = step_batch(store, [store.open_row(1, 2)], [0], 1)
    q = mx.zeros((1, 4, 1, 8))
    with pytest.raises(TypeError, match="described as bfloat16"):
        batch.caches[0].attend(q, q[:, :2], q[:, :2])
