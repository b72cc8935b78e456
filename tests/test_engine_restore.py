"""Handing one row's KV to another, and taking a step back: the same bits as if it had never happened."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_family import HIDDEN, ToyModel, full, recurrent, window

from darkbloom_core.engine import KvStore, step_batch

PATTERNS = {
    "full": [full(), full()],
    "windows": [window(8), full(), window(16)],
    "sinks": [window(8, sinks=True), full(sinks=True)],
    "borrowing": [window(8), full(), window(8, source=0), full(source=1)],
    "recurrent": [recurrent(), full(), window(8), recurrent()],
}
GRID = 12  # not a multiple of any window, so rings are captured in two pieces
CAN_STEP_BACK = [name for name, layers in PATTERNS.items() if not any(kind.state for kind in layers)]


class Player:
    """Runs rows of one model by hand; ``store`` and ``model`` are those of the engine."""

    def __init__(self, layers, rows=3, shared_tokens=0):
        self.model = ToyModel(layers)
        self.store = KvStore(self.model.layers, rows, shared_tokens)

    def run(self, row, ids, position):
        """Logits ``[V]`` after ``ids``, of which the first stands at ``position``."""
        batch = step_batch(self.store, [row], [position], len(ids))
        (hidden,) = self.model.run_layers(self.model.embed(mx.array([ids])), batch, 0, len(self.model.layers))
        return np.array(self.model.logits(hidden[:, -1:]))[0]

    def prefill(self, row, ids):
        """The whole prompt, on the grid."""
        for start in range(0, len(ids), GRID):
            logits = self.run(row, ids[start : start + GRID], start)
        return logits

    def decode(self, row, ids, position):
        return np.stack([self.run(row, [token], position + place) for place, token in enumerate(ids)])


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def held(captured):
    mx.eval(captured)
    return captured


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=6, deadline=None)
@given(
    blocks=st.integers(1, 4),
    rest=st.integers(1, 12),
    shared=st.sampled_from([0, 32, 512]),
    neighbour=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_a_row_that_is_handed_a_prefix_goes_on_with_the_bits_of_one_that_computed_it(
    pattern, blocks, rest, shared, neighbour, seed
):
    player = Player(PATTERNS[pattern], shared_tokens=shared)
    store, ids, later = player.store, tokens(GRID * blocks + rest, seed), tokens(12, seed + 1)
    first = store.open_row(len(ids), 200)
    captured = []
    for start in range(0, GRID * blocks, GRID):
        player.run(first, ids[start : start + GRID], start)
        captured.append(held(store.capture(first, start, start + GRID)))
    expected = [
        player.run(first, ids[GRID * blocks :], GRID * blocks),
        *player.decode(first, later, len(ids)),
    ]

    player.prefill(store.open_row(neighbour, 64), tokens(neighbour, seed + 2))
    second = store.open_row(len(ids), 200)
    assert second.lane != first.lane
    for number, piece in enumerate(captured, 1):
        store.restore(second, piece, GRID * number)
    actual = [
        player.run(second, ids[GRID * blocks :], GRID * blocks),
        *player.decode(second, later, len(ids)),
    ]
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_was_captured_is_not_changed_by_the_row_that_goes_on(pattern):
    player = Player(PATTERNS[pattern], rows=1)
    row = player.store.open_row(30, 100)
    player.prefill(row, tokens(30))
    captured = held(player.store.capture(row, 0, 30))
    before = [np.array(array) for arrays in captured for array in arrays]
    player.decode(row, tokens(20, 1), 30)
    player.store.close_row(row)
    player.prefill(player.store.open_row(30, 100), tokens(30, 2))
    after = [np.array(array) for arrays in captured for array in arrays]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_what_is_captured_has_the_shapes_that_are_said():
    layers = [window(8), full(), full(source=1), recurrent()]
    player = Player(layers)
    row = player.store.open_row(30, 100)
    player.prefill(row, tokens(30))
    shapes = [[tuple(array.shape) for array in arrays] for arrays in player.store.capture(row, 16, 30)]
    assert shapes == [[(1, 2, 8, 8)] * 2, [(1, 2, 14, 8)] * 2, [], [(1, HIDDEN)]]
    shapes = [[tuple(array.shape) for array in arrays] for arrays in player.store.capture(row, 26, 30)]
    assert shapes[:2] == [[(1, 2, 4, 8)] * 2] * 2


@pytest.mark.parametrize("shared", [0, 512])
@pytest.mark.parametrize("pattern", CAN_STEP_BACK)
def test_a_token_that_is_taken_back_leaves_nothing_behind(pattern, shared):
    ids, plain, back = tokens(45), Player(PATTERNS[pattern]), Player(PATTERNS[pattern], shared_tokens=shared)
    rows = [player.store.open_row(20, 100) for player in (plain, back)]
    plain.prefill(rows[0], ids[:20])
    back.prefill(rows[1], ids[:20])
    for position in range(20, 45):
        expected = plain.run(rows[0], [ids[position]], position)
        wrong = back.run(rows[1], [63 - ids[position]], position)
        assert not np.array_equal(wrong, expected)
        assert np.array_equal(back.run(rows[1], [ids[position]], position), expected)
