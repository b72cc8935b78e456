"""A decode step: one token for each of several rows.

Everything about a step that is not data is its ``DecodeShape``: which lanes, how many keys
each row looks at, which rings have wrapped. With an exact shape every view is as long as
what it holds and needs no mask unless rows differ; with a rounded one the views are a
little longer and masked, so that one shape, and one compiled graph, serves many steps.
On CUDA a kernel attends for all rows by their lengths, and needs neither views nor masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from darkbloom_core.contracts import LayerCache, LayerKind
from darkbloom_core.engine._caches import AttendingCache, BorrowingCache, RecurrentCache, attention, written
from darkbloom_core.engine._decode_cuda import attend_rows, serves
from darkbloom_core.engine._kv import KvPair, KvStore, Row, is_full

ROUNDED_KEYS = 64
"""A rounded shape looks at a multiple of this many keys."""

STACK_SHARE = 0.75
"""Rows of the shared slab attend in one call if at least this share of the keys it would look at are their own."""

MLX_FUSED_DIMS = (64, 96, 128)
"""Head sizes for which MLX has a CUDA kernel for one row without a mask."""

STACK_SLACK_KEYS = 64
"""A call of its own costs a row about as much as looking at this many keys."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """``views[b]`` keys are looked at by row ``b`` in full layers; ``wrapped`` are the windows that are full in all rows."""

    lanes: tuple[int, ...]
    shared: tuple[bool, ...]
    views: tuple[int, ...]
    stacked: bool
    wrapped: frozenset[int]
    exact: bool

    @property
    def first_lane(self) -> int:
        return self.lanes[0]

    @property
    def lane_count(self) -> int:
        """Lanes from the first row's to the last's, holes included."""
        return self.lanes[-1] - self.lanes[0] + 1

    @property
    def has_holes(self) -> bool:
        return self.lane_count != len(self.lanes)


def decode_shape(
    store: KvStore, rows: Sequence[Row], positions: Sequence[int], *, exact: bool
) -> DecodeShape:
    """The shape of a step of ``rows``, in ascending order of lane, that hold ``positions`` tokens each."""
    lanes = tuple(row.lane for row in rows)
    shared = tuple(row.is_shared for row in rows)
    if not exact and all(shared) and store.has_kernel:  # which goes by the offsets: one graph for all lengths
        views = (store.shared_tokens,) * len(rows)
        return DecodeShape(lanes, shared, views, stacked=len(rows) > 1, wrapped=frozenset(), exact=False)
    held = [position + 1 for position in positions]
    windows = {kind.window for kind in store.layers if kind.window is not None}
    looked_at = (lanes[-1] - lanes[0] + 1) * max(held)
    stacked = (
        len(rows) > 1 and all(shared) and sum(held) + STACK_SLACK_KEYS * len(rows) >= STACK_SHARE * looked_at
    )
    views = (
        tuple(held)
        if exact
        else tuple(_rounded(count, store, row) for count, row in zip(held, rows, strict=True))
    )
    return DecodeShape(
        lanes=lanes,
        shared=shared,
        views=(max(views),) * len(rows) if stacked and not exact else views,
        stacked=stacked,
        wrapped=frozenset(window for window in windows if min(held) >= window),
        exact=exact,
    )


def _rounded(held: int, store: KvStore, row: Row) -> int:
    limit = store.shared_tokens if row.is_shared else row.limit_tokens
    return min(-(-held // ROUNDED_KEYS) * ROUNDED_KEYS, limit)


@dataclass(slots=True)
class LayerArrays:
    """What one layer of a decode step reads and writes: its slab, the rows' own buffers, its recurrent states."""

    slab: KvPair | None
    own: list[KvPair | None]
    states: list[mx.array]


def layer_arrays(store: KvStore, rows: Sequence[Row]) -> list[LayerArrays]:
    """The store's own arrays for a step of ``rows``."""
    return [
        LayerArrays(
            store.slabs[index],
            [row.buffers[index] if row.buffers is not None else None for row in rows]
            if is_full(kind)
            else [],
            store.states[index],
        )
        for index, kind in enumerate(store.layers)
    ]


class DecodeStep:
    """What the layer caches of a step share. ``offsets`` is ``[B]`` int32."""

    def __init__(self, shape: DecodeShape, offsets: mx.array) -> None:
        self.shape = shape
        self.offsets = offsets
        self._masks: dict[int, mx.array] = {}
        self._slots: dict[int, mx.array] = {}
        self._starts: dict[tuple[int, int], mx.array] = {}
        self.lanes = mx.array(list(shape.lanes))
        self.order = self._places = None
        if shape.has_holes:
            self.order = _lane_order(shape)
            # From Python's numbers: a compiled step is compiled anew for each constant in its arithmetic.
            self._places = mx.array([lane - shape.first_lane for lane in shape.lanes])

    def slots(self, window: int) -> mx.array:
        """``[B]`` int32: the ring slot that each row's token goes to."""
        if window not in self._slots:
            self._slots[window] = self.offsets % window
        return self._slots[window]

    def start(self, row: int, lane: int) -> mx.array:
        """``[2]`` int32: ``lane`` and the token where row ``row`` is written."""
        if (row, lane) not in self._starts:
            one = mx.array([lane], mx.int32)
            self._starts[row, lane] = mx.concatenate([one, self.offsets[row : row + 1]])
        return self._starts[row, lane]

    def mask(self, keys: int) -> mx.array:
        """``[lanes, 1, 1, keys]`` bool: the first ``offset + 1`` keys of each lane from the first row's to the last's.

        It serves rings too: until a ring has wrapped its slots are positions, and after
        that every slot counts.
        """
        if keys not in self._masks:
            offsets = self.offsets if self.order is None else self.offsets[self.order]
            self._masks[keys] = (mx.arange(keys)[None] <= offsets[:, None])[:, None, None, :]
        return self._masks[keys]

    def spread(self, q: mx.array) -> mx.array:
        """``q`` ``[B, ...]`` to one entry per lane from the first row's to the last's."""
        return q if self.order is None else q[self.order]

    def gather(self, out: mx.array) -> mx.array:
        """The rows' entries of ``out`` ``[lanes, ...]``."""
        return out if self._places is None else out[self._places]


class DecodeBatch:
    """Implements ``contracts.Batch`` for one token of each row. ``offsets`` is ``[B]`` int32."""

    def __init__(
        self,
        layers: Sequence[LayerKind],
        shape: DecodeShape,
        offsets: mx.array,
        arrays: Sequence[LayerArrays],
    ) -> None:
        self.offsets = offsets
        self._step = DecodeStep(shape, offsets)
        self.caches: list[LayerCache] = []
        for kind, one in zip(layers, arrays, strict=True):
            self.caches.append(self._cache(kind, one))

    def _cache(self, kind: LayerKind, arrays: LayerArrays) -> LayerCache:
        if kind.source is not None:
            source = self.caches[kind.source]
            assert isinstance(source, DecodeFull | DecodeWindow)
            return BorrowingCache(kind, source)
        if kind.state:
            return RecurrentCache(arrays.states, self._step.shape.lanes)
        if is_full(kind):
            return DecodeFull(self._step, kind, arrays)
        assert arrays.slab is not None
        return DecodeWindow(self._step, kind, arrays.slab)


class DecodeWindow(AttendingCache):
    """A sliding layer: rings of all rows written by one scatter and attended at once, in slot order."""

    def __init__(self, step: DecodeStep, kind: LayerKind, ring: KvPair) -> None:
        self._step = step
        self._kind = kind
        self._ring = ring

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        k, v = written(self._kind, k, v)
        step, ring, shape = self._step, self._ring, self._step.shape
        if shape.exact and len(shape.lanes) == 1:
            ring.write(shape.first_lane, k, v, (shape.views[0] - 1) % ring.tokens)
        else:
            slots = step.slots(ring.tokens)
            ring.k[step.lanes, :, slots] = k[:, :, 0]
            ring.v[step.lanes, :, slots] = v[:, :, 0]
        return self.look(q, self._kind, sinks)

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        step, ring, shape = self._step, self._ring, self._step.shape
        if _is_for_kernel(shape, q, ring):
            return attend_rows(q, ring.k, ring.v, step.lanes, step.offsets, scale=kind.scale, sinks=sinks)
        if shape.exact and len(shape.lanes) == 1:
            k, v = ring.view(shape.first_lane, 0, min(shape.views[0], ring.tokens))
            return attention(q, k, v, scale=kind.scale, sinks=sinks)
        first, end = shape.first_lane, shape.first_lane + shape.lane_count
        mask = None if ring.tokens in shape.wrapped else step.mask(ring.tokens)
        out = attention(
            step.spread(q), ring.k[first:end], ring.v[first:end], scale=kind.scale, mask=mask, sinks=sinks
        )
        return step.gather(out)


class DecodeFull(AttendingCache):
    """A full layer: rows of the shared slab attend in one call where their lengths are near, others one by one.

    If no row has buffers of its own, a kernel takes them all in one call, whatever their lengths.
    """

    def __init__(self, step: DecodeStep, kind: LayerKind, arrays: LayerArrays) -> None:
        self._step = step
        self._kind = kind
        self._slab = arrays.slab
        self._own = arrays.own

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        k, v = written(self._kind, k, v)
        shape = self._step.shape
        if len(shape.lanes) > 1 and all(shape.shared):
            assert self._slab is not None
            self._slab.k[self._step.lanes, :, self._step.offsets] = k[:, :, 0]
            self._slab.v[self._step.lanes, :, self._step.offsets] = v[:, :, 0]
        else:
            count = len(shape.lanes)
            for row, (one_k, one_v) in enumerate(zip(mx.split(k, count), mx.split(v, count), strict=True)):
                self._write_row(row, one_k, one_v)
        return self.look(q, self._kind, sinks)

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        step, shape, slab = self._step, self._step.shape, self._slab
        if slab is not None and all(shape.shared) and _is_for_kernel(shape, q, slab):
            return attend_rows(q, slab.k, slab.v, step.lanes, step.offsets, scale=kind.scale, sinks=sinks)
        if shape.stacked:
            assert self._slab is not None
            first, end, keys = shape.first_lane, shape.first_lane + shape.lane_count, max(shape.views)
            k, v = self._slab.k[first:end, :, :keys], self._slab.v[first:end, :, :keys]
            mask = None if shape.exact and min(shape.views) == keys else step.mask(keys)
            return step.gather(attention(step.spread(q), k, v, scale=kind.scale, mask=mask, sinks=sinks))
        if len(shape.lanes) == 1:
            return self._look_row(0, q, kind, sinks)
        rows = enumerate(mx.split(q, len(shape.lanes)))
        return mx.concatenate([self._look_row(row, one, kind, sinks) for row, one in rows])

    def _place(self, row: int) -> tuple[KvPair, int]:
        own = self._own[row]
        if own is not None:
            return own, 0
        assert self._slab is not None
        return self._slab, self._step.shape.lanes[row]

    def _write_row(self, row: int, k: mx.array, v: mx.array) -> None:
        pair, lane = self._place(row)
        if self._step.shape.exact:
            pair.write(lane, k, v, self._step.shape.views[row] - 1)
            return
        place = self._step.start(row, lane)
        pair.k = mx.slice_update(pair.k, k, place, (0, 2))
        pair.v = mx.slice_update(pair.v, v, place, (0, 2))

    def _look_row(self, row: int, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        pair, lane = self._place(row)
        keys = self._step.shape.views[row]
        k, v = pair.view(lane, 0, keys)
        mask = None
        if not self._step.shape.exact:
            mask = (mx.arange(keys) <= self._step.offsets[row])[None, None, None]
        return attention(q, k, v, scale=kind.scale, mask=mask, sinks=sinks)


def _is_for_kernel(shape: DecodeShape, q: mx.array, pair: KvPair) -> bool:
    """Whether all rows attend to ``pair``, a slab, in one call of our own kernel."""
    is_alone = shape.exact and len(shape.lanes) == 1 and q.shape[-1] in MLX_FUSED_DIMS
    return not is_alone and serves(q, pair.k, pair.v)


def _lane_order(shape: DecodeShape) -> mx.array:
    """``[lanes]``: which row's query stands at each lane from the first row's to the last's; row 0 in a hole."""
    order = [0] * shape.lane_count
    for row, lane in enumerate(shape.lanes):
        order[lane - shape.first_lane] = row
    return mx.array(order)
