"""What the layer caches of every kind of step have in common.

Always true: a cache does not know the batch that lists it, only what the caches of a step
share. A batch dies with its last reference, and with it what it holds of a row's KV; in a
cycle it would hold that until the garbage collector comes, outside the ledger.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from darkbloom_core.contracts import LayerKind

attention = mx.fast.scaled_dot_product_attention


class AttendingCache:
    """What every attending layer answers when it is asked for a recurrent state."""

    def state(self) -> tuple[mx.array, ...]:
        raise TypeError("an attending layer has no recurrent state")

    def set_state(self, new: tuple[mx.array, ...]) -> None:
        raise TypeError("an attending layer has no recurrent state")


class Lendable(Protocol):
    """A storing layer's cache, as a borrowing layer sees it."""

    def look(self, q: mx.array, kind: LayerKind, sinks: mx.array | None) -> mx.array:
        """Attend without writing; ``kind`` is the asking layer's own."""
        ...


class BorrowingCache(AttendingCache):
    """A layer that stores nothing: it looks at its source's KV after the source's write of this step."""

    def __init__(self, kind: LayerKind, source: Lendable) -> None:
        self._kind = kind
        self._source = source

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        if k is not None or v is not None:
            raise TypeError("a borrowing layer attends with k and v None")
        return self._source.look(q, self._kind, sinks)


class RecurrentCache:
    """A recurrent layer: some lanes of its state slabs."""

    def __init__(self, arrays: list[mx.array], lanes: tuple[int, ...]) -> None:
        self._arrays = arrays
        self._lanes = mx.array(list(lanes))

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, *, sinks: mx.array | None = None
    ) -> mx.array:
        raise TypeError("a recurrent layer does not attend")

    def state(self) -> tuple[mx.array, ...]:
        return tuple(array[self._lanes] for array in self._arrays)

    def set_state(self, new: tuple[mx.array, ...]) -> None:
        for array, value in zip(self._arrays, new, strict=True):
            array[self._lanes] = value


def written(kind: LayerKind, k: mx.array | None, v: mx.array | None) -> tuple[mx.array, mx.array]:
    """``k`` and ``v`` of a storing layer. Raises ``TypeError`` if they are missing or in another dtype than described."""
    if k is None or v is None:
        raise TypeError("a layer that stores attends with its own k and v")
    if str(k.dtype) != f"mlx.core.{kind.dtype}" or k.dtype != v.dtype:
        raise TypeError(f"k is {k.dtype} and v {v.dtype}, but the layer was described as {kind.dtype}")
    return k, v
