"""A decode step at one fixed batch size, for deterministic mode: a row's bits cannot depend on its neighbours.

Every step has ``size`` rows; a sequence's index in the batch is its lane, and lanes that
decode nothing are filled with token 0 and store nothing. Sliding layers attend all lanes
at once and always masked, full layers row by row at the row's own length: no kernel's
shape depends on who else is there. Whether lanes of a size give equal bits is tested on
the device before the size is used (``find_size``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from darkbloom_core.contracts import LayerCache, LayerKind, LoadedModel
from darkbloom_core.engine._caches import AttendingCache, BorrowingCache, attention, written
from darkbloom_core.engine._kv import KvPair, KvStore, Row, is_full


class FixedStep:
    """What the layer caches of a step share: ``rows`` at ``positions``, in a batch of ``size`` lanes."""

    def __init__(self, rows: Sequence[Row], positions: Sequence[int], size: int) -> None:
        self.size = size
        self.rows = tuple(rows)
        self.positions = tuple(positions)
        self.lanes = mx.array([row.lane for row in rows])
        spread = [0] * size
        for row, position in zip(rows, positions, strict=True):
            spread[row.lane] = position
        self.offsets = mx.array(spread, mx.int32)
        self._masks: dict[int, mx.array] = {}

    def mask(self, keys: int) -> mx.array:
        """``[size, 1, 1, keys]`` bool: what each lane holds of its ring."""
        if keys not in self._masks:
            self._masks[keys] = (mx.arange(keys)[None] <= self.offsets[:, None])[:, None, None, :]
        return self._masks[keys]


class FixedBatch:
    """Implements ``contracts.Batch``: ``size`` rows of one token, of which ``rows`` are sequences."""

    def __init__(self, store: KvStore, rows: Sequence[Row], positions: Sequence[int], size: int) -> None:
        for row, position in zip(rows, positions, strict=True):
            store.make_room(row, position + 1)
        self._step = FixedStep(rows, positions, size)
        self.lanes, self.offsets = self._step.lanes, self._step.offsets
        self.caches: list[LayerCache] = []
        for index, kind in enumerate(store.layers):
            self.caches.append(self._cache(store, index, kind))

    def _cache(self, store: KvStore, index: int, kind: LayerKind) -> LayerCache:
        if kind.source is not None:
            source = self.caches[kind.source]
            assert isinstance(source, FixedFull | FixedWindow)
            return BorrowingCache(kind, source)
        if kind.state:
            return FixedRecurrent(self._step, store.states[index])
        slab = store.slabs[index]
        if not is_full(kind):
            assert slab is not None
            return FixedWindow(self._step, kind, slab)
        places: list[tuple[KvPair, int]] = []
        for row in self._step.rows:
            if row.buffers is not None:
                places.append((row.buffers[index], 0))
            else:
                assert slab is not None
                places.append((slab, row.lane))
        return FixedFull(self._step, kind, places)


class FixedWindow(AttendingCache):
    """A sliding layer: the rings of all lanes at once, always masked."""

    def __init__(self, step: FixedStep, kind: LayerKind, ring: KvPair) -> None:
        self._step = step
        self._kind = kind
        self._ring = ring

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        k, v = written(self._kind, k, v)
        for row, position in zip(self._step.rows, self._step.positions, strict=True):
            lane = row.lane
            self._ring.ring_write(lane, k[lane : lane + 1], v[lane : lane + 1], position)
        return self.look(q, self._kind, sinks)

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        size, ring = self._step.size, self._ring
        mask = self._step.mask(ring.tokens)
        return attention(q, ring.k[:size], ring.v[:size], scale=kind.scale, mask=mask, sinks=sinks)


class FixedFull(AttendingCache):
    """A full layer: row by row at the row's own length. ``places[b]`` is where row ``b`` keeps its KV."""

    def __init__(self, step: FixedStep, kind: LayerKind, places: list[tuple[KvPair, int]]) -> None:
        self._step = step
        self._kind = kind
        self._places = places

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        k, v = written(self._kind, k, v)
        for row, position, (pair, lane) in self._rows():
            pair.write(lane, k[row.lane : row.lane + 1], v[row.lane : row.lane + 1], position)
        return self.look(q, self._kind, sinks)

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        out = [mx.zeros((1, *q.shape[1:3], kind.v_dim), q.dtype)] * self._step.size
        for row, position, (pair, lane) in self._rows():
            k, v = pair.view(lane, 0, position + 1)
            out[row.lane] = attention(q[row.lane : row.lane + 1], k, v, scale=kind.scale, sinks=sinks)
        return mx.concatenate(out)

    def _rows(self) -> Iterable[tuple[Row, int, tuple[KvPair, int]]]:
        return zip(self._step.rows, self._step.positions, self._places, strict=True)


class FixedRecurrent:
    """A recurrent layer: all lanes run, the sequences' states are stored."""

    def __init__(self, step: FixedStep, arrays: list[mx.array]) -> None:
        self._step = step
        self._arrays = arrays

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        raise TypeError("a recurrent layer does not attend")

    def state(self) -> tuple[mx.array, ...]:
        return tuple(array[: self._step.size] for array in self._arrays)

    def set_state(self, new: tuple[mx.array, ...]) -> None:
        for array, value in zip(self._arrays, new, strict=True):
            array[self._step.lanes] = value[self._step.lanes]


def run_fixed(
    model: LoadedModel,
    store: KvStore,
    rows: Sequence[Row],
    positions: Sequence[int],
    tokens: mx.array,
    size: int,
) -> mx.array:
    """Logits ``[len(rows), V]`` of one step; ``tokens`` is ``[len(rows)]`` int32."""
    batch = FixedBatch(store, rows, positions, size)
    spread = mx.zeros((size,), mx.int32)
    spread[batch.lanes] = tokens
    inputs = model.run_layers(model.embed(spread[:, None]), batch, 0, len(store.layers))
    return model.logits(inputs[0])[batch.lanes]


def find_size(model: LoadedModel, rows: int, largest: int) -> int | None:
    """The smallest batch size from ``rows`` to ``largest`` whose lanes give equal bits on this device, or None."""
    return next((size for size in range(rows, largest + 1) if lanes_are_equal(model, size)), None)


def lanes_are_equal(model: LoadedModel, size: int) -> bool:
    """Whether equal rows in all lanes get equal bits, and keep them when all the others change."""
    same = _probe(model, [1] * size)
    if not all(mx.array_equal(same[0], same[lane]) for lane in range(size)):
        return False
    return all(
        bool(mx.array_equal(same[lane], _probe(model, _others(size, lane))[lane])) for lane in (0, size - 1)
    )


PROBE_STEPS = 3


def _probe(model: LoadedModel, tokens: list[int]) -> mx.array:
    """``[size, V]``: logits of the last of a few steps, in which each lane repeats its token."""
    store = KvStore(model.description.layers, len(tokens))
    rows = [store.open_row(1, PROBE_STEPS) for _ in tokens]
    logits = mx.array([])
    for step in range(PROBE_STEPS):
        logits = run_fixed(model, store, rows, [step] * len(rows), mx.array(tokens, mx.int32), len(rows))
        mx.eval(logits)
    return logits


def _others(size: int, lane: int) -> list[int]:
    return [1 if index == lane else 2 + index for index in range(size)]
