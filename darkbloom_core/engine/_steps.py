"""One door to the two kinds of step, for whoever runs a model by hand: tests, goldens, the conformance kit."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from darkbloom_core.contracts import Batch, MediaSpan
from darkbloom_core.engine._chunk import ChunkBatch
from darkbloom_core.engine._decode import DecodeBatch, decode_shape, layer_arrays
from darkbloom_core.engine._kv import KvStore, Row


def step_batch(
    store: KvStore,
    rows: Sequence[Row],
    positions: Sequence[int],
    length: int,
    spans: tuple[MediaSpan, ...] = (),
) -> Batch:
    """A batch for ``length`` new tokens of each of ``rows``, which hold ``positions`` tokens.

    Several rows, which must be in ascending order of lane, take one token each; a single
    row may take any number. ``spans`` are those of its prompt that lie in these tokens.
    """
    if length > 1:
        (row,) = rows
        return ChunkBatch(store, row, positions[0], length, spans)
    for row, position in zip(rows, positions, strict=True):
        store.make_room(row, position + 1)
    shape = decode_shape(store, rows, positions, exact=True)
    offsets = mx.array(list(positions), mx.int32)
    return DecodeBatch(store.layers, shape, offsets, layer_arrays(store, rows))
