"""What a model's layers see during one step: positions, and a cache per layer that writes KV and attends.

A decode batch is ``B`` rows of one token; a prefill batch is one row of a chunk. The mask
of a step is a pure function of positions, window and lengths. No padding, and no row can
see another.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from darkbloom_core.contracts import LayerCache, LayerKind
from darkbloom_core.engine._kv import FullBuffer, KvStore, RingSlab, Row, StateSlab

_attention = mx.fast.scaled_dot_product_attention


class StepBatch:
    """The rows of one step; implements ``contracts.Batch``.

    ``positions[b]`` is how many positions row ``b`` held before the step and ``length``
    how many tokens each row adds. Rows must be in ascending order of lane.
    """

    def __init__(self, store: KvStore, rows: Sequence[Row], positions: Sequence[int], length: int) -> None:
        self.store = store
        self.rows = tuple(rows)
        self.positions = tuple(positions)
        self.length = length
        self.offsets = mx.array(list(positions), mx.int32)
        self.touched: list[mx.array] = []
        self._shared: dict[tuple[str, int], mx.array | str | None] = {}
        self.caches: list[LayerCache] = []
        for index, kind in enumerate(store.layers):
            self.caches.append(self._cache(index, kind))

    def _cache(self, index: int, kind: LayerKind) -> LayerCache:
        if kind.source is not None:
            source = self.caches[kind.source]
            assert isinstance(source, FullCache | WindowCache)
            return BorrowingCache(self, kind, source)
        slab = self.store.slabs[index]
        if isinstance(slab, StateSlab):
            return RecurrentCache(self, slab)
        if isinstance(slab, RingSlab):
            return WindowCache(self, kind, slab)
        return FullCache(self, kind, index)

    @property
    def lanes(self) -> mx.array:
        """``[B]`` int32."""
        key = ("lanes", 0)
        if key not in self._shared:
            self._shared[key] = mx.array([row.lane for row in self.rows], mx.int32)
        return self._shared[key]  # type: ignore[return-value]  # this key always holds an array

    def slots(self, window: int) -> mx.array:
        """``[B]`` int32: the ring slot that each row's token goes to."""
        key = ("slots", window)
        if key not in self._shared:
            self._shared[key] = mx.array([position % window for position in self.positions], mx.int32)
        return self._shared[key]  # type: ignore[return-value]  # this key always holds an array

    def ring_mask(self, window: int) -> mx.array | None:
        """``[lanes, 1, 1, window]`` bool over the lanes from the first row's to the last's; None if every ring is full."""
        key = ("ring", window)
        if key not in self._shared:
            if min(self.positions) + 1 >= window:
                self._shared[key] = None
            else:
                counts = [window] * (self.rows[-1].lane - self.rows[0].lane + 1)
                for row, position in zip(self.rows, self.positions, strict=True):
                    counts[row.lane - self.rows[0].lane] = min(position + 1, window)
                held = mx.arange(window)[None] < mx.array(counts)[:, None]
                self._shared[key] = held[:, None, None, :]
        return self._shared[key]  # type: ignore[return-value]  # this key holds an array or None

    def lane_order(self) -> mx.array | None:
        """``[lanes]`` int32: which row's query stands at each lane from the first row's to the last's; None if there is no hole."""
        first, last = self.rows[0].lane, self.rows[-1].lane
        if last - first + 1 == len(self.rows):
            return None
        key = ("order", 0)
        if key not in self._shared:
            order = [0] * (last - first + 1)
            for index, row in enumerate(self.rows):
                order[row.lane - first] = index
            self._shared[key] = mx.array(order, mx.int32)
        return self._shared[key]  # type: ignore[return-value]  # this key always holds an array

    def chunk_mask(self, window: int) -> mx.array | str | None:
        """The mask of a chunk that sees up to ``window - 1`` earlier positions and itself."""
        history = min(self.positions[0], window - 1)
        if history + self.length <= window:
            return "causal" if self.length > 1 else None
        key = ("chunk", window)
        if key not in self._shared:
            query = mx.arange(history, history + self.length)[:, None]
            position = mx.arange(history + self.length)[None]
            self._shared[key] = (position <= query) & (position > query - window)
        return self._shared[key]


class _AttendingCache:
    """What every attending layer answers when it is asked for a recurrent state."""

    def state(self) -> tuple[mx.array, ...]:
        raise TypeError("an attending layer has no recurrent state")

    def set_state(self, new: tuple[mx.array, ...]) -> None:
        raise TypeError("an attending layer has no recurrent state")


class FullCache(_AttendingCache):
    """A full layer: one buffer per row; rows attend one by one."""

    def __init__(self, batch: StepBatch, kind: LayerKind, index: int) -> None:
        self._batch = batch
        self._kind = kind
        self._index = index

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        assert k is not None
        assert v is not None
        batch = self._batch
        if len(batch.rows) == 1:
            self._buffer(0).write(k, v, batch.positions[0])
            return self.look(q, self._kind, sinks)
        count = len(batch.rows)
        for index, (one_k, one_v) in enumerate(zip(mx.split(k, count), mx.split(v, count), strict=True)):
            self._buffer(index).write(one_k, one_v, batch.positions[index])
        return self.look(q, self._kind, sinks)

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        batch = self._batch
        if len(batch.rows) == 1:
            k, v = self._buffer(0).view(batch.positions[0] + batch.length)
            mask = "causal" if batch.length > 1 else None
            return _attention(q, k, v, scale=kind.scale, mask=mask, sinks=sinks)
        out = []
        for index, one_q in enumerate(mx.split(q, len(batch.rows))):
            k, v = self._buffer(index).view(batch.positions[index] + 1)
            out.append(_attention(one_q, k, v, scale=kind.scale, sinks=sinks))
        return mx.concatenate(out)

    def _buffer(self, row: int) -> FullBuffer:
        buffer = self._batch.rows[row].buffers[self._index]
        assert buffer is not None
        return buffer


class WindowCache(_AttendingCache):
    """A sliding layer: rings of all rows in one slab, written by one scatter and attended at once, in slot order."""

    def __init__(self, batch: StepBatch, kind: LayerKind, slab: RingSlab) -> None:
        self._batch = batch
        self._kind = kind
        self._slab = slab
        self._chunk: tuple[mx.array, mx.array] | None = None

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        assert k is not None
        assert v is not None
        batch, slab = self._batch, self._slab
        if batch.length > 1:
            lane, position = batch.rows[0].lane, batch.positions[0]
            history = slab.history(lane, position)
            self._chunk = (
                (k, v)
                if history is None
                else (
                    mx.concatenate([history[0], k], axis=2),
                    mx.concatenate([history[1], v], axis=2),
                )
            )
            out = self.look(q, self._kind, sinks)
            slab.store(lane, k, v, position)
            batch.touched += [slab.k, slab.v]
            return out
        if len(batch.rows) == 1:
            slab.store(batch.rows[0].lane, k, v, batch.positions[0])
        else:
            lanes, slots = batch.lanes, batch.slots(slab.window)
            slab.k[lanes, :, slots] = k[:, :, 0]
            slab.v[lanes, :, slots] = v[:, :, 0]
        return self.look(q, self._kind, sinks)

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        batch, slab = self._batch, self._slab
        if self._chunk is not None:
            k, v = self._chunk
            return _attention(q, k, v, scale=kind.scale, mask=batch.chunk_mask(slab.window), sinks=sinks)
        first, last = batch.rows[0].lane, batch.rows[-1].lane
        if first == last:
            held = min(batch.positions[0] + 1, slab.window)
            k, v = slab.k[first : first + 1, :, :held], slab.v[first : first + 1, :, :held]
            return _attention(q, k, v, scale=kind.scale, sinks=sinks)
        order = batch.lane_order()
        k, v = slab.k[first : last + 1], slab.v[first : last + 1]
        mask = batch.ring_mask(slab.window)
        if order is None:
            return _attention(q, k, v, scale=kind.scale, mask=mask, sinks=sinks)
        spread = _attention(q[order], k, v, scale=kind.scale, mask=mask, sinks=sinks)
        return spread[batch.lanes - first]


class BorrowingCache(_AttendingCache):
    """A layer that stores nothing: it looks at its source's KV after the source's write of this step."""

    def __init__(self, batch: StepBatch, kind: LayerKind, source: FullCache | WindowCache) -> None:
        self._batch = batch
        self._kind = kind
        self._source = source

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        assert k is None
        assert v is None
        return self._source.look(q, self._kind, sinks)


class RecurrentCache:
    """A recurrent layer: the rows' lanes of its state slab."""

    def __init__(self, batch: StepBatch, slab: StateSlab) -> None:
        self._batch = batch
        self._slab = slab

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        raise TypeError("a recurrent layer does not attend")

    def state(self) -> tuple[mx.array, ...]:
        return tuple(array[self._batch.lanes] for array in self._slab.arrays)

    def set_state(self, new: tuple[mx.array, ...]) -> None:
        for array, value in zip(self._slab.arrays, new, strict=True):
            array[self._batch.lanes] = value
        self._batch.touched += self._slab.arrays
