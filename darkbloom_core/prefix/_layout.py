"""What the parts of a block are: which tokens of which layers, packed in one array each. Pure tables.

| part | of a block | layers |
|---|---|---|
| full | all its tokens | those that keep every token |
| window | those that a reuse ending at the next grid line, or later, can need | sliding ones |
| state | the state after its last token, if that is a grid line | recurrent ones |

Always true: reuse ends on grid lines only, so what a row's rings hold when a chunk ends on a
grid line is enough to capture the window parts of all its blocks. Layers that borrow have
nothing in any part. All sizes come from ``LayerKind.parts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from darkbloom_core.contracts import ELEMENT_BYTES, Dtype, LayerKind, StatePart
from darkbloom_core.prefix._hashing import BLOCK_TOKENS

PartName: TypeAlias = Literal["full", "window", "state"]
PART_NAMES: tuple[PartName, ...] = ("full", "window", "state")


@dataclass(frozen=True, slots=True)
class Piece:
    """One array of one layer inside a packed part, row-major from ``offset_bytes`` on.

    ``name`` is that of ``StatePart``. K and V have the shape ``[kv_heads, tokens, dim]`` and
    hold ``tokens`` tokens from the block's token ``first_token`` on; a state has its own
    shape, and 0 for both.
    """

    layer: int
    name: str
    first_token: int
    tokens: int
    shape: tuple[int, ...]
    dtype: Dtype
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


class PartLayout:
    """The tables of one model: ``grid_tokens`` is its chunk grid, a multiple of the block.

    Raises ``ValueError`` if it is not.
    """

    def __init__(self, layers: Sequence[LayerKind], grid_tokens: int) -> None:
        if grid_tokens <= 0 or grid_tokens % BLOCK_TOKENS:
            raise ValueError(f"the grid must be a multiple of {BLOCK_TOKENS} tokens, not {grid_tokens}")
        self.grid_tokens = grid_tokens
        self._blocks_of_grid = grid_tokens // BLOCK_TOKENS
        self._layers = tuple(layers)
        self._reach_tokens = max(
            (part.window or 0 for layer in layers for part in layer.parts if part.extent == "window"),
            default=0,
        )
        self._tables = [
            {name: tuple(self._table(place, name)) for name in PART_NAMES}
            for place in range(self._blocks_of_grid)
        ]
        self._sizes = [
            {name: sum(piece.size_bytes for piece in pieces) for name, pieces in tables.items()}
            for tables in self._tables
        ]

    def pieces(self, block: int, part: PartName) -> tuple[Piece, ...]:
        """What the part of block number ``block``, counted from 0, is made of, in order; empty if it has none."""
        return self._tables[block % self._blocks_of_grid][part]

    def part_bytes(self, block: int, part: PartName) -> int:
        """Length of the packed part; 0 if the block has no such part."""
        return self._sizes[block % self._blocks_of_grid][part]

    def dtype(self, part: PartName) -> Dtype | None:
        """The dtype of every piece of the part; None if pieces differ, or there are none."""
        found = {piece.dtype for tables in self._tables for piece in tables[part]}
        return found.pop() if len(found) == 1 else None

    def boundaries(self, cuts: Sequence[int]) -> list[int]:
        """Where reuse of a prompt may end, in tokens: cuts on the grid that leave a token to compute."""
        return [cut for cut in cuts[:-1] if cut % self.grid_tokens == 0]

    def needs_full(self, block: int) -> bool:
        """Whether a reuse needs this block's full part."""
        return self.part_bytes(block, "full") > 0

    def needs_at(self, boundary: int) -> tuple[tuple[int, PartName], ...]:
        """Besides full parts: the (block, part) that a reuse ending at token ``boundary``, on the grid, needs."""
        blocks = boundary // BLOCK_TOKENS
        first = max(0, (boundary - self._reach_tokens) // BLOCK_TOKENS)
        windows: list[tuple[int, PartName]] = [(block, "window") for block in range(first, blocks)]
        states: list[tuple[int, PartName]] = [(blocks - 1, "state")]
        return tuple(one for one in windows + states if self.part_bytes(*one))

    def _table(self, place: int, name: PartName) -> Iterator[Piece]:
        offset = 0
        for index, layer in enumerate(self._layers):
            for part in layer.parts:
                piece = self._piece(place, index, part, offset) if _belongs(part, name) else None
                if piece is not None:
                    offset += piece.size_bytes
                    yield piece

    def _piece(self, place: int, layer: int, part: StatePart, offset: int) -> Piece | None:
        """``place`` is which block of a grid cell it is."""
        if part.extent == "constant":
            is_last = place == self._blocks_of_grid - 1
            return Piece(layer, part.name, 0, 0, part.shape, part.dtype, offset) if is_last else None
        first = 0
        if part.window is not None:
            first = max(0, self.grid_tokens - part.window - place * BLOCK_TOKENS)
        tokens = BLOCK_TOKENS - first
        if tokens <= 0:
            return None
        heads, dim = part.shape
        return Piece(layer, part.name, first, tokens, (heads, tokens, dim), part.dtype, offset)


def _belongs(part: StatePart, name: PartName) -> bool:
    return {"full": "full", "window": "window", "constant": "state"}[part.extent] == name
