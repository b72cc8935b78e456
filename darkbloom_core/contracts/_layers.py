"""What a layer keeps between tokens: its parts, their shapes, their bytes.

Nothing else in darkbloom multiplies heads by dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16"]

ELEMENT_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StatePart:
    """One named array of a layer's state.

    ``extent`` says how it grows: ``"full"`` keeps every token, ``"window"`` the last
    ``window`` tokens, ``"constant"`` does not grow. ``shape`` is that of one token
    (``[kv_heads, dim]``), or of the whole state if it is constant.
    """

    name: str
    extent: Literal["full", "window", "constant"]
    shape: tuple[int, ...]
    dtype: Dtype
    window: int | None = None

    @property
    def bytes_each(self) -> int:
        """Bytes of one token, or of the whole state if it is constant."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def tokens_held(self, tokens: int) -> int:
        """How many tokens are kept after ``tokens`` were seen (1 for a constant state)."""
        if self.extent == "constant":
            return 1
        if self.window is not None:
            return min(tokens, self.window)
        return tokens

    def bytes(self, tokens: int) -> int:
        """Bytes held after ``tokens`` tokens."""
        return self.bytes_each * self.tokens_held(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """One layer, as storage, masks, admission, prefix reuse and the disk format see it.

    A layer attends (``state`` empty) or is recurrent (``state`` names the shapes of its
    fixed-size state, without the batch axis). ``window`` limits attention to the last
    ``window`` positions, the query's own included. ``source`` is the index of an earlier
    layer whose K and V this one borrows: it stores nothing. ``spans`` says how positions
    of one picture see each other: ``"causal"`` not specially, ``"window"`` both ways
    inside the window.
    """

    q_heads: int = 0
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    scale: float = 1.0
    window: int | None = None
    source: int | None = None
    sinks: bool = False
    softcap: float | None = None
    spans: Literal["causal", "window"] = "causal"
    state: tuple[tuple[int, ...], ...] = ()
    dtype: Dtype = "bfloat16"

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """The arrays that this layer stores; empty if it borrows another layer's."""
        if self.source is not None:
            return ()
        if self.state:
            return tuple(
                StatePart(f"state{index}", "constant", shape, self.dtype)
                for index, shape in enumerate(self.state)
            )
        extent: Literal["full", "window"] = "full" if self.window is None else "window"
        return (
            StatePart("k", extent, (self.kv_heads, self.k_dim), self.dtype, self.window),
            StatePart("v", extent, (self.kv_heads, self.v_dim), self.dtype, self.window),
        )

    def bytes(self, tokens: int) -> int:
        """Bytes that this layer holds for one sequence of ``tokens`` tokens."""
        return sum(part.bytes(tokens) for part in self.parts)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token costs once every window is full."""
        return sum(part.bytes_each for part in self.parts if part.extent == "full")
