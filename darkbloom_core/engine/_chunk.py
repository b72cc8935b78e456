"""A prefill step: one row, one chunk of its prompt, in slices of layers.

What a layer sees is a pure function of where the chunk starts and how long it is: up to
``window - 1`` earlier positions and the whole chunk in a sliding layer, everything before
it and itself in a full one. Masks are symbolic where a symbol says it.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from darkbloom_core.contracts import LayerCache, LayerKind, MediaSpan
from darkbloom_core.engine._caches import AttendingCache, BorrowingCache, RecurrentCache, attention, written
from darkbloom_core.engine._kv import KvPair, KvStore, Row, is_full
from darkbloom_core.engine._spans import picture_runs


class Chunk:
    """Tokens ``start`` to ``start + length - 1`` of a prompt: what the layer caches of a step share.

    ``pictures`` are the places in the chunk, (first, end), whose tokens see each other both
    ways in layers that say so.
    """

    def __init__(self, start: int, length: int, pictures: tuple[tuple[int, int], ...] = ()) -> None:
        self.start = start
        self.length = length
        self.pictures = pictures
        self._masks: dict[tuple[int | None, bool], mx.array] = {}

    @property
    def end(self) -> int:
        return self.start + self.length

    def mask(self, window: int | None, *, both_ways: bool) -> mx.array | str | None:
        """The mask of a layer over its history and the chunk, in order of time; ``window`` None: it sees everything.

        ``both_ways``: tokens of one picture see each other, the later ones too, as far as the window reaches.
        """
        history = self.start if window is None else min(self.start, window - 1)
        both_ways = both_ways and any(end - first > 1 for first, end in self.pictures)
        if not both_ways and (window is None or history + self.length <= window):
            return "causal" if self.length > 1 else None
        if (window, both_ways) not in self._masks:
            self._masks[window, both_ways] = self._explicit(window, history, both_ways)
        return self._masks[window, both_ways]

    def _explicit(self, window: int | None, history: int, both_ways: bool) -> mx.array:
        query = mx.arange(history, history + self.length)[:, None]
        position = mx.arange(history + self.length)[None]
        seen = position <= query
        if both_ways:
            numbers = np.full(history + self.length, -1, np.int32)
            for number, (first, end) in enumerate(self.pictures):
                numbers[history + first : history + end] = number
            picture = mx.array(numbers)
            of_query = picture[history:, None]
            seen = seen | ((of_query == picture[None]) & (of_query >= 0))
        return seen if window is None else seen & (position > query - window)


class ChunkBatch:
    """Implements ``contracts.Batch`` for tokens ``start`` to ``start + length - 1`` of one row.

    ``spans`` are those of the prompt that lie in the chunk. Pictures that touch are one, as
    in ``transformers``.
    """

    def __init__(
        self, store: KvStore, row: Row, start: int, length: int, spans: tuple[MediaSpan, ...] = ()
    ) -> None:
        store.make_room(row, start + length)
        self.row = row
        self.offsets = mx.array([start], mx.int32)
        pictures = tuple((first - start, end - start) for first, end in picture_runs(spans))
        self._chunk = Chunk(start, length, pictures)
        self._store = store
        self._lenders = {kind.source for kind in store.layers}
        self.caches: list[LayerCache] = []
        for index, kind in enumerate(store.layers):
            self.caches.append(self._cache(index, kind, row))

    def written(self, first: int, last: int) -> list[mx.array]:
        """What layers ``first`` to ``last - 1`` have written and nothing in this step reads: rings, in a first chunk.

        What a step reads and then writes, a ring with a history or a state, is not here:
        written while it is still being read, all of it would be copied. The write runs with
        the next step that looks at the layer.
        """
        if self._chunk.start > 0:
            return []
        rings = [cache.pair for cache in self.caches[first:last] if isinstance(cache, ChunkWindow)]
        return [array for ring in rings for array in (ring.k, ring.v)]

    def _cache(self, index: int, kind: LayerKind, row: Row) -> LayerCache:
        if kind.source is not None:
            source = self.caches[kind.source]
            assert isinstance(source, ChunkFull | ChunkWindow)
            return BorrowingCache(kind, source)
        if kind.state:
            return RecurrentCache(self._store.states[index], (row.lane,))
        slab = self._store.slabs[index]
        if not is_full(kind):
            assert slab is not None
            return ChunkWindow(self._chunk, kind, slab, row.lane, lends=index in self._lenders)
        if row.buffers is not None:
            return ChunkFull(self._chunk, kind, row.buffers[index], 0)
        assert slab is not None
        return ChunkFull(self._chunk, kind, slab, row.lane)


class ChunkFull(AttendingCache):
    """A full layer of one row: a buffer's only lane, or the row's lane of the shared slab."""

    def __init__(self, chunk: Chunk, kind: LayerKind, pair: KvPair, lane: int) -> None:
        self._chunk = chunk
        self._kind = kind
        self._lane = lane
        self.pair = pair

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        k, v = written(self._kind, k, v)
        self.pair.write(self._lane, k, v, self._chunk.start)
        return self.look(q, self._kind, sinks)

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        k, v = self.pair.view(self._lane, 0, self._chunk.end)
        mask = self._chunk.mask(None, both_ways=kind.spans == "window")
        return attention(q, k, v, scale=kind.scale, mask=mask, sinks=sinks)


class ChunkWindow(AttendingCache):
    """A sliding layer of one row.

    If it ``lends``, what it attended to is kept until the chunk is done: of each part of the
    chunk K and V of up to ``window - 1`` tokens and its own.
    """

    def __init__(self, chunk: Chunk, kind: LayerKind, pair: KvPair, lane: int, *, lends: bool) -> None:
        self._chunk = chunk
        self._kind = kind
        self._lane = lane
        self._lends = lends
        self._seen: tuple[mx.array, mx.array] | None = None
        self.pair = pair

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        k, v = written(self._kind, k, v)
        history = self.pair.ring_history(self._lane, self._chunk.start)
        self._seen = (k, v)
        if history is not None:
            self._seen = (
                mx.concatenate([history[0], k], axis=2),
                mx.concatenate([history[1], v], axis=2),
            )
        out = self.look(q, self._kind, sinks)
        if not self._lends:
            self._seen = None  # a window for each layer, and in a chunk of parts for each of them
        self.pair.ring_write(self._lane, k, v, self._chunk.start)
        return out

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        assert self._seen is not None
        k, v = self._seen
        mask = self._chunk.mask(self.pair.tokens, both_ways=kind.spans == "window")
        return attention(q, k, v, scale=kind.scale, mask=mask, sinks=sinks)
