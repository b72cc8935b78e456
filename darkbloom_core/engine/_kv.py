"""Storage of sequence state. A row owns its storage and its position in every layer; a batch is a list of rows.

| layer | storage |
|---|---|
| full | short rows: a lane of one slab ``[rows, kv_heads, shared_tokens, dim]``; longer ones: a buffer of their own |
| window | a lane of one slab ``[rows, kv_heads, window, dim]``, position ``p`` in slot ``p % window`` |
| recurrent | a lane of one slab per state ``[rows, *shape]`` |
| borrowing | none |

Always true: joining or leaving moves no other row's data; a buffer grows by doubling, never
per token; a row that outgrows the shared slab moves itself, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from darkbloom_core.contracts import LayerKind
from darkbloom_core.engine._decode_cuda import serves_layers
from darkbloom_core.errors import UnsupportedCheckpoint

GROWTH_TOKENS = 256
"""Buffers of full layers are whole multiples of this many tokens."""

CapturedLayers: TypeAlias = tuple[tuple[mx.array, ...], ...]
"""What was captured of a row, one entry per layer: K and V, or the states, or nothing."""

MLX_DTYPES: dict[str, Any] = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def storage_tokens(tokens: int) -> int:
    """``tokens`` rounded up to what a full layer's buffer really allocates."""
    return -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS


def row_bytes(layers: Sequence[LayerKind], tokens: int) -> int:
    """Bytes that a row of at most ``tokens`` tokens may come to allocate for itself in full layers."""
    return sum(
        part.bytes(storage_tokens(tokens))
        for layer in layers
        for part in layer.parts
        if part.extent == "full"
    )


def lane_bytes(layers: Sequence[LayerKind]) -> int:
    """Bytes of one lane of every window layer's rings and every recurrent layer's states."""
    return sum(
        part.bytes(part.window or 1) for layer in layers for part in layer.parts if part.extent != "full"
    )


class KvPair:
    """K ``[n, kv_heads, tokens, k_dim]`` and V ``[n, kv_heads, tokens, v_dim]``, written in place."""

    __slots__ = ("k", "v")

    def __init__(self, k: mx.array, v: mx.array) -> None:
        self.k = k
        self.v = v

    @property
    def tokens(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write(self, lane: int, k: mx.array, v: mx.array, start: int) -> None:
        """Store ``k`` and ``v`` ``[1, kv_heads, L, dim]`` in ``lane`` from token ``start`` on."""
        end = start + k.shape[2]
        self.k[lane : lane + 1, :, start:end] = k
        self.v[lane : lane + 1, :, start:end] = v

    def view(self, lane: int, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Tokens ``start`` to ``end - 1`` of ``lane``."""
        return self.k[lane : lane + 1, :, start:end], self.v[lane : lane + 1, :, start:end]

    def ring_history(self, lane: int, position: int) -> tuple[mx.array, mx.array] | None:
        """Of a ring: up to ``window - 1`` positions before ``position``, in order of time; None if there are none."""
        count = min(position, self.tokens - 1)
        return self.ring_view(lane, position - count, position) if count else None

    def ring_view(self, lane: int, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Of a ring that holds ``end`` positions: those from ``start`` on, at most ``window``, in order of time."""
        window = self.tokens
        first, stop = start % window, end % window or window
        if first < stop:
            return self.view(lane, first, stop)
        old, new = self.view(lane, first, window), self.view(lane, 0, stop)
        return mx.concatenate([old[0], new[0]], axis=2), mx.concatenate([old[1], new[1]], axis=2)

    def ring_write(self, lane: int, k: mx.array, v: mx.array, start: int) -> None:
        """Of a ring: keep the last ``window`` of ``k`` and ``v`` ``[1, kv_heads, L, dim]``, a run from ``start`` on."""
        window, length = self.tokens, k.shape[2]
        if length > window:
            k, v = k[:, :, -window:], v[:, :, -window:]
            start, length = start + length - window, window
        slot = start % window
        head = min(length, window - slot)
        self.write(lane, k[:, :, :head], v[:, :, :head], slot)
        if head < length:
            self.write(lane, k[:, :, head:], v[:, :, head:], 0)


class Row:
    """One sequence's storage: a lane in every slab, and in full layers a place in the shared slab or own buffers."""

    __slots__ = ("buffers", "lane", "limit_tokens")

    def __init__(self, lane: int, limit_tokens: int, buffers: dict[int, KvPair] | None) -> None:
        self.lane = lane
        self.limit_tokens = storage_tokens(limit_tokens)
        self.buffers = buffers

    @property
    def is_shared(self) -> bool:
        """Whether the row's full layers live in the shared slab."""
        return self.buffers is None


class KvStore:
    """All rows of one engine. Touched by the engine's thread only.

    Slabs of ``max_rows`` lanes are allocated at once (``slab_bytes``). ``shared_tokens`` is
    how long a row may be in the shared slab of full layers; 0 for none. ``has_kernel``:
    on this device one kernel attends for all rows of a decode step that are in the slab.
    """

    def __init__(self, layers: Sequence[LayerKind], max_rows: int, shared_tokens: int = 0) -> None:
        _check(layers)
        self.layers = tuple(layers)
        self.shared_tokens = shared_tokens
        self.slab_bytes = slab_bytes(layers, max_rows, shared_tokens)
        self.has_kernel = serves_layers(self.layers, shared_tokens)
        self._max_rows = max_rows
        self._free_lanes = list(range(max_rows))
        self._rows: list[Row] = []
        self.slabs: list[KvPair | None] = []
        self.states: list[list[mx.array]] = []
        self._allocate()

    @property
    def open_rows(self) -> int:
        return len(self._rows)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all arrays: slabs, and the buffers of open rows as large as they are now."""
        own = [row.buffers for row in tuple(self._rows) if row.buffers is not None]
        return self.slab_bytes + sum(pair.nbytes for buffers in own for pair in tuple(buffers.values()))

    @property
    def arrays(self) -> int:
        """How many arrays there are now: slabs, states, and the buffers of open rows."""
        own = [row.buffers for row in tuple(self._rows) if row.buffers is not None]
        return self._slab_arrays + 2 * sum(map(len, own))

    @property
    def most_arrays(self) -> int:
        """How many there may be: every row with buffers of its own, all of them just growing."""
        return self._slab_arrays + self._max_rows * 2 * 2 * len(list(self._full_layers()))

    @property
    def _slab_arrays(self) -> int:
        return 2 * len(self._pairs()) + sum(map(len, self.states))

    def open_row(self, prompt_tokens: int, limit_tokens: int) -> Row:
        """Open storage for a sequence of at most ``limit_tokens`` tokens, the lowest free lane first."""
        lane = min(self._free_lanes)
        self._free_lanes.remove(lane)
        shared = prompt_tokens < self.shared_tokens
        row = Row(lane, limit_tokens, None if shared else {})
        if not shared:
            first = min(storage_tokens(prompt_tokens + GROWTH_TOKENS), row.limit_tokens)
            row.buffers = {index: self._buffer(index, first) for index in self._full_layers()}
        for states in self.states:
            for array in states:
                array[lane] = mx.zeros(array.shape[1:], array.dtype)
        self._rows.append(row)
        return row

    def close_row(self, row: Row) -> None:
        """Give the lane back and drop the buffers."""
        self._rows.remove(row)
        row.buffers = None
        self._free_lanes.append(row.lane)

    def make_room(self, row: Row, tokens: int) -> None:
        """Let ``row`` hold ``tokens`` tokens: out of the shared slab if it outgrows it, or a larger buffer."""
        if row.buffers is None:
            if tokens > self.shared_tokens:
                self._move_out(row, tokens)
            return
        for index, pair in row.buffers.items():
            if tokens > pair.tokens:
                row.buffers[index] = self._grown(
                    index, pair, pair.tokens, _capacity(row, pair.tokens, tokens)
                )

    def capture(self, row: Row, start: int, end: int) -> CapturedLayers:
        """What ``row``, which holds exactly ``end`` tokens, keeps of tokens ``start`` to ``end - 1``, layer by layer.

        A full layer gives K and V ``[1, kv_heads, end - start, dim]`` of all of them, a window
        layer of the last ``window`` in order of time, a recurrent layer its state after
        ``end`` tokens ``[1, *shape]``, a borrowing layer nothing. The arrays are copies, and
        lazy: evaluate them before anything else is written to the store, or that write copies
        the buffers that they still read.
        """
        captured: list[tuple[mx.array, ...]] = []
        for index, kind in enumerate(self.layers):
            views: tuple[mx.array, ...] = ()
            if kind.state:
                views = tuple(array[row.lane : row.lane + 1] for array in self.states[index])
            elif kind.source is None:
                pair, lane = self._place(row, index)
                first = start if kind.window is None else max(start, end - kind.window)
                views = (pair.view if kind.window is None else pair.ring_view)(lane, first, end)
            captured.append(tuple(mx.contiguous(view) for view in views))
        return tuple(captured)

    def restore(self, row: Row, captured: CapturedLayers, end: int) -> None:
        """Write what ``capture`` gave up to ``end`` into ``row``, which then holds ``end`` tokens.

        Pieces that were captured one after the other are restored in the same order. What a
        full layer holds before the piece, and a window layer before its part of it, stays; so
        does all that a layer holds for which nothing is given.
        """
        self.make_room(row, end)
        for index, (kind, arrays) in enumerate(zip(self.layers, captured, strict=True)):
            if not arrays:
                continue
            if kind.state:
                for array, value in zip(self.states[index], arrays, strict=True):
                    array[row.lane : row.lane + 1] = value
            else:
                k, v = arrays
                pair, lane = self._place(row, index)
                write = pair.write if kind.window is None else pair.ring_write
                write(lane, k, v, end - k.shape[2])

    def arrays_of(self, row: Row) -> list[mx.array]:
        """All arrays that ``row`` has a part of: evaluated, what was written to it is done."""
        own = [] if row.buffers is None else list(row.buffers.values())
        pairs = [array for pair in (*self._pairs(), *own) for array in (pair.k, pair.v)]
        return [*pairs, *(array for states in self.states for array in states)]

    def finish(self) -> None:
        """Run the writes to slabs that no step has looked at yet, at most one of each layer."""
        mx.eval([pair.k for pair in self._pairs()], [pair.v for pair in self._pairs()], self.states)

    def repair(self) -> bool:
        """After a failed step: make sure that the slabs hold values. False if they had to be cleared."""
        try:
            self.finish()
        except Exception:  # whatever broke the step broke the slabs: their contents are lost
            self._allocate()
            return False
        return True

    def _place(self, row: Row, index: int) -> tuple[KvPair, int]:
        """Where ``row`` keeps the KV of an attending layer that stores: the arrays, and its lane in them."""
        if row.buffers is not None and index in row.buffers:
            return row.buffers[index], 0
        slab = self.slabs[index]
        assert slab is not None
        return slab, row.lane

    def _move_out(self, row: Row, tokens: int) -> None:
        capacity = _capacity(row, self.shared_tokens, tokens)
        row.buffers = {}
        for index in self._full_layers():
            slab = self.slabs[index]
            assert slab is not None
            k, v = slab.view(row.lane, 0, self.shared_tokens)
            row.buffers[index] = self._grown(index, KvPair(k, v), self.shared_tokens, capacity)
        # now: the step that comes writes to the slab, and would copy what is still being read
        mx.eval([(pair.k, pair.v) for pair in row.buffers.values()])

    def _grown(self, index: int, old: KvPair, held: int, capacity: int) -> KvPair:
        new = self._buffer(index, capacity)
        new.write(0, old.k[:, :, :held], old.v[:, :, :held], 0)
        return new

    def _buffer(self, index: int, tokens: int) -> KvPair:
        return _zeros(self.layers[index], 1, tokens)

    def _full_layers(self) -> Iterator[int]:
        return (index for index, kind in enumerate(self.layers) if is_full(kind))

    def _pairs(self) -> list[KvPair]:
        return [pair for pair in self.slabs if pair is not None]

    def _allocate(self) -> None:
        self.slabs = [_slab(kind, self._max_rows, self.shared_tokens) for kind in self.layers]
        self.states = [
            [mx.zeros((self._max_rows, *shape), MLX_DTYPES[kind.dtype]) for shape in kind.state]
            for kind in self.layers
        ]
        self.finish()


def slab_bytes(layers: Sequence[LayerKind], max_rows: int, shared_tokens: int) -> int:
    """Bytes of all slabs of a store."""
    return max_rows * (lane_bytes(layers) + (row_bytes(layers, shared_tokens) if shared_tokens else 0))


def is_full(kind: LayerKind) -> bool:
    """Whether the layer stores every token of its own."""
    return kind.source is None and not kind.state and kind.window is None


def _capacity(row: Row, now: int, tokens: int) -> int:
    while now < tokens:
        now *= 2
    return min(now, row.limit_tokens)


def _zeros(kind: LayerKind, lanes: int, tokens: int) -> KvPair:
    dtype = MLX_DTYPES[kind.dtype]
    shape = (lanes, kind.kv_heads, tokens)
    return KvPair(mx.zeros((*shape, kind.k_dim), dtype), mx.zeros((*shape, kind.v_dim), dtype))


def _slab(kind: LayerKind, lanes: int, shared_tokens: int) -> KvPair | None:
    if kind.source is not None or kind.state:
        return None
    if kind.window is not None:
        return _zeros(kind, lanes, kind.window)
    return _zeros(kind, lanes, shared_tokens) if shared_tokens else None


def _check(layers: Sequence[LayerKind]) -> None:
    for index, kind in enumerate(layers):
        if kind.softcap is not None:
            raise UnsupportedCheckpoint(
                f"layer {index} caps its attention scores, which no backend here does"
            )
        if kind.source is None:
            continue
        source = layers[kind.source] if kind.source < index else None
        if source is None or source.source is not None or source.state or source.window != kind.window:
            raise UnsupportedCheckpoint(
                f"layer {index} borrows from layer {kind.source}, which does not store the same span"
            )
