"""A prefill step of several short prompts at once, each from its first token to its last.

Rows are padded at their ends to the longest; since attention is causal nobody sees
padding, and none of it is stored. What a row computes is that of its own chunk up to the
rounding that comes with another shape, so only prompts that prefix reuse never sees are
packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from darkbloom_core.contracts import LayerCache, LayerKind
from darkbloom_core.engine._caches import AttendingCache, BorrowingCache, attention, written
from darkbloom_core.engine._kv import KvPair, KvStore, Row, is_full


class Pack:
    """Prompts of ``lengths`` tokens: what the layer caches of a step share."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.length = max(lengths)
        self._masks: dict[int, mx.array] = {}

    def mask(self, window: int | None) -> mx.array | str:
        """Causal, and inside the window where the pack is longer than it."""
        if window is None or self.length <= window:
            return "causal"
        if window not in self._masks:
            query, key = mx.arange(self.length)[:, None], mx.arange(self.length)[None]
            self._masks[window] = (key <= query) & (key > query - window)
        return self._masks[window]


class PackBatch:
    """Implements ``contracts.Batch`` for ``lengths[b]`` tokens from position 0 of each of ``rows``."""

    def __init__(self, store: KvStore, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            store.make_room(row, length)
        self.rows = tuple(rows)
        self.offsets = mx.zeros((len(rows),), mx.int32)
        self._pack = Pack(lengths)
        self.caches: list[LayerCache] = []
        for index, kind in enumerate(store.layers):
            self.caches.append(self._cache(store, index, kind))

    @property
    def is_empty(self) -> bool:
        """All rows were dropped."""
        return not any(self._pack.lengths)

    def drop(self, row: Row) -> None:
        """Store nothing more for ``row``: its sequence has ended and its place may be another's."""
        self._pack.lengths[self.rows.index(row)] = 0

    def written(self, first: int, last: int) -> list[mx.array]:
        """The arrays that layers ``first`` to ``last - 1`` have written to; a pack reads none of them."""
        caches = [cache for cache in self.caches[first:last] if isinstance(cache, PackCache)]
        return [array for cache in caches for pair, _ in cache.places for array in (pair.k, pair.v)]

    def _cache(self, store: KvStore, index: int, kind: LayerKind) -> LayerCache:
        if kind.source is not None:
            source = self.caches[kind.source]
            assert isinstance(source, PackCache)
            return BorrowingCache(kind, source)
        slab = store.slabs[index]
        places: list[tuple[KvPair, int]] = []
        for row in self.rows:
            own = row.buffers[index] if is_full(kind) and row.buffers is not None else None
            if own is not None:
                places.append((own, 0))
            else:
                assert slab is not None
                places.append((slab, row.lane))
        return PackCache(self._pack, kind, places)


class PackCache(AttendingCache):
    """An attending layer of either kind. ``places[b]`` is where row ``b``'s KV goes."""

    def __init__(self, pack: Pack, kind: LayerKind, places: list[tuple[KvPair, int]]) -> None:
        self._pack = pack
        self._kind = kind
        self._seen: tuple[mx.array, mx.array] | None = None
        self.places = places

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        k, v = written(self._kind, k, v)
        self._seen = (k, v)
        out = self.look(q, self._kind, sinks)
        for row, ((pair, lane), length) in enumerate(zip(self.places, self._pack.lengths, strict=True)):
            one_k, one_v = k[row : row + 1, :, :length], v[row : row + 1, :, :length]
            if length == 0:
                continue
            if self._kind.window is None:
                pair.write(lane, one_k, one_v, 0)
            else:
                pair.ring_write(lane, one_k, one_v, 0)
        return out

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        assert self._seen is not None
        mask = self._pack.mask(kind.window)
        return attention(q, *self._seen, scale=kind.scale, mask=mask, sinks=sinks)


def last_positions(hidden: mx.array, rows: Sequence[int], lengths: Sequence[int]) -> mx.array:
    """``[len(rows), 1, H]`` of ``hidden`` ``[B, L, H]``: the last of each row's ``lengths`` tokens."""
    return hidden[mx.array(list(rows)), mx.array([length - 1 for length in lengths])][:, None]


def can_pack(layers: Sequence[LayerKind]) -> bool:
    """Whether prompts of a model may be packed: a recurrent state would run on over the padding."""
    return not any(kind.state for kind in layers)
