"""Storage of sequence state. A row owns its storage and its position in every layer; a batch is a list of rows.

Always true: joining or leaving moves no other row's data; a full layer's buffer grows by
doubling, never per token; a window layer's ring keeps position ``p`` in slot ``p % window``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from darkbloom_core.contracts import LayerKind
from darkbloom_core.errors import UnsupportedCheckpoint

GROWTH_TOKENS = 256
"""Buffers of full layers are whole multiples of this many tokens."""

_DTYPES: dict[str, Any] = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def storage_tokens(tokens: int) -> int:
    """``tokens`` rounded up to what a full layer's buffer really allocates."""
    return -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS


def row_bytes(layers: Sequence[LayerKind], tokens: int) -> int:
    """Bytes that a row of at most ``tokens`` tokens allocates in full layers; rings and states are lanes."""
    return sum(
        part.bytes(storage_tokens(tokens))
        for layer in layers
        for part in layer.parts
        if part.extent == "full"
    )


def lane_bytes(layers: Sequence[LayerKind]) -> int:
    """Bytes of one lane: every window layer's ring and every recurrent layer's state."""
    return sum(
        part.bytes(part.window or 1) for layer in layers for part in layer.parts if part.extent != "full"
    )


class FullBuffer:
    """K and V of one row in one full layer, each ``[1, kv_heads, capacity, dim]``."""

    __slots__ = ("_kind", "_limit_tokens", "k", "v")

    def __init__(self, kind: LayerKind, first_tokens: int, limit_tokens: int) -> None:
        self._kind = kind
        self._limit_tokens = storage_tokens(limit_tokens)
        capacity = min(storage_tokens(first_tokens), self._limit_tokens)
        dtype = _DTYPES[kind.dtype]
        self.k = mx.zeros((1, kind.kv_heads, capacity, kind.k_dim), dtype)
        self.v = mx.zeros((1, kind.kv_heads, capacity, kind.v_dim), dtype)

    def write(self, k: mx.array, v: mx.array, start: int) -> None:
        """Store ``k`` and ``v`` ``[1, kv_heads, L, dim]`` at positions ``start`` and on."""
        end = start + k.shape[2]
        if end > self.k.shape[2]:
            self._grow(end)
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v

    def view(self, end: int) -> tuple[mx.array, mx.array]:
        """K and V of positions 0 to ``end - 1``."""
        return self.k[:, :, :end], self.v[:, :, :end]

    def _grow(self, end: int) -> None:
        capacity = self.k.shape[2]
        while capacity < end:
            capacity *= 2
        padding = [(0, 0), (0, 0), (0, min(capacity, self._limit_tokens) - self.k.shape[2]), (0, 0)]
        self.k = mx.pad(self.k, padding)
        self.v = mx.pad(self.v, padding)


class RingSlab:
    """The rings of one window layer: K and V of all lanes, each ``[lanes, kv_heads, window, dim]``."""

    __slots__ = ("k", "v", "window")

    def __init__(self, kind: LayerKind, lanes: int) -> None:
        assert kind.window is not None
        dtype = _DTYPES[kind.dtype]
        self.window = kind.window
        self.k = mx.zeros((lanes, kind.kv_heads, kind.window, kind.k_dim), dtype)
        self.v = mx.zeros((lanes, kind.kv_heads, kind.window, kind.v_dim), dtype)

    def history(self, lane: int, position: int) -> tuple[mx.array, mx.array] | None:
        """K and V of up to ``window - 1`` positions before ``position``, in order of time."""
        count = min(position, self.window - 1)
        if count == 0:
            return None
        first, end = (position - count) % self.window, position % self.window or self.window
        if first < end:
            return self.k[lane : lane + 1, :, first:end], self.v[lane : lane + 1, :, first:end]
        return (
            mx.concatenate([self.k[lane : lane + 1, :, first:], self.k[lane : lane + 1, :, :end]], axis=2),
            mx.concatenate([self.v[lane : lane + 1, :, first:], self.v[lane : lane + 1, :, :end]], axis=2),
        )

    def store(self, lane: int, k: mx.array, v: mx.array, start: int) -> None:
        """Keep the last ``window`` of ``k`` and ``v`` ``[1, kv_heads, L, dim]``, the run starting at ``start``."""
        length = k.shape[2]
        if length > self.window:
            k, v = k[:, :, -self.window :], v[:, :, -self.window :]
            start, length = start + length - self.window, self.window
        slot = start % self.window
        head = min(length, self.window - slot)
        self.k[lane : lane + 1, :, slot : slot + head] = k[:, :, :head]
        self.v[lane : lane + 1, :, slot : slot + head] = v[:, :, :head]
        if head < length:
            self.k[lane : lane + 1, :, : length - head] = k[:, :, head:]
            self.v[lane : lane + 1, :, : length - head] = v[:, :, head:]


class StateSlab:
    """The states of one recurrent layer: arrays ``[lanes, *shape]``."""

    __slots__ = ("arrays",)

    def __init__(self, kind: LayerKind, lanes: int) -> None:
        dtype = _DTYPES[kind.dtype]
        self.arrays = [mx.zeros((lanes, *shape), dtype) for shape in kind.state]

    def clear(self, lane: int) -> None:
        for array in self.arrays:
            array[lane] = mx.zeros(array.shape[1:], array.dtype)


class Row:
    """One sequence's storage: a lane in every slab and a buffer in every full layer."""

    __slots__ = ("buffers", "lane")

    def __init__(self, lane: int, buffers: list[FullBuffer | None]) -> None:
        self.lane = lane
        self.buffers = buffers


class KvStore:
    """All rows of one engine. Touched by the engine's thread only.

    Slabs of ``max_rows`` lanes are allocated at once (``slab_bytes``); a row's full-layer
    buffers when the row opens.
    """

    def __init__(self, layers: Sequence[LayerKind], max_rows: int) -> None:
        for index, kind in enumerate(layers):
            if kind.softcap is not None:
                raise UnsupportedCheckpoint(
                    f"layer {index} caps its attention scores, which no backend here does"
                )
            if kind.source is not None and (kind.source >= index or layers[kind.source].source is not None):
                raise UnsupportedCheckpoint(
                    f"layer {index} borrows from layer {kind.source}, which does not store"
                )
        self.layers = tuple(layers)
        self.slab_bytes = max_rows * lane_bytes(layers)
        self.slabs: list[RingSlab | StateSlab | None] = [_slab(kind, max_rows) for kind in layers]
        self._max_rows = max_rows
        self._free_lanes = list(range(max_rows))
        self._rows: list[Row] = []
        mx.eval([array for slab in self.slabs for array in _arrays(slab)])

    @property
    def open_rows(self) -> int:
        return len(self._rows)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all arrays: slabs, and the buffers of open rows as large as they are now."""
        buffers = [one for row in tuple(self._rows) for one in row.buffers if one is not None]
        return self.slab_bytes + sum(one.k.nbytes + one.v.nbytes for one in buffers)

    def open_row(self, prompt_tokens: int, limit_tokens: int) -> Row:
        """Open storage for a sequence of at most ``limit_tokens`` tokens, the lowest free lane first."""
        lane = min(self._free_lanes)
        self._free_lanes.remove(lane)
        first = prompt_tokens + GROWTH_TOKENS
        buffers = [FullBuffer(kind, first, limit_tokens) if _is_full(kind) else None for kind in self.layers]
        for slab in self.slabs:
            if isinstance(slab, StateSlab):
                slab.clear(lane)
        row = Row(lane, buffers)
        self._rows.append(row)
        return row

    def close_row(self, row: Row) -> None:
        """Give the lane back and drop the buffers."""
        self._rows.remove(row)
        row.buffers = []
        self._free_lanes.append(row.lane)

    def repair(self) -> bool:
        """After a failed step: make sure that the slabs hold values. False if they had to be cleared."""
        try:
            mx.eval([array for slab in self.slabs for array in _arrays(slab)])
        except Exception:  # whatever broke the step broke the slabs: their contents are lost
            self.slabs = [_slab(kind, self._max_rows) for kind in self.layers]
            return False
        return True


def _is_full(kind: LayerKind) -> bool:
    return kind.source is None and not kind.state and kind.window is None


def _slab(kind: LayerKind, lanes: int) -> RingSlab | StateSlab | None:
    if kind.source is not None or _is_full(kind):
        return None
    return StateSlab(kind, lanes) if kind.state else RingSlab(kind, lanes)


def _arrays(slab: RingSlab | StateSlab | None) -> list[mx.array]:
    if isinstance(slab, RingSlab):
        return [slab.k, slab.v]
    return slab.arrays if slab is not None else []
