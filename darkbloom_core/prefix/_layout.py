"""What the blocks of a prompt are, and what their parts are: which tokens of which layers, packed in one array each.

| part | of a block | layers |
|---|---|---|
| full | all its tokens | those that keep every token |
| window | those that a reuse ending where its chunk ends, or later, can need | sliding ones |
| state | the state after its last token, if its chunk ends there | recurrent ones |

Pure tables. Always true: reuse ends where a chunk ends, so what a row's rings hold there is
enough to capture the window parts of all the chunk's blocks, and no block lies in two chunks.
Layers that borrow have nothing in any part. All sizes come from ``LayerKind.parts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from darkbloom_core.contracts import ELEMENT_BYTES, Dtype, LayerKind, StatePart
from darkbloom_core.prefix._hashing import BLOCK_TOKENS, Block, prompt_blocks

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
        self._layers = tuple(layers)
        self.reach_tokens = max(
            (part.window or 0 for layer in layers for part in layer.parts if part.extent == "window"),
            default=0,
        )
        self._tables: dict[tuple[int, PartName], tuple[tuple[Piece, ...], int]] = {}

    def of(self, cuts: Sequence[int]) -> PromptParts:
        """The parts of a prompt of which a cold prefill runs the chunks that end at ``cuts``."""
        return PromptParts(self, cuts)

    def dtype(self, part: PartName) -> Dtype | None:
        """The dtype of every piece of the part; None if pieces differ, or there are none."""
        found = {
            one.dtype for layer in self._layers for one in layer.parts if _PART_OF_EXTENT[one.extent] == part
        }
        return found.pop() if len(found) == 1 else None

    def table(self, block: Block, part: PartName) -> tuple[tuple[Piece, ...], int]:
        """The pieces of the packed part, in order, and its length in bytes; nothing if the block has no such part."""
        rest = block.chunk_end - block.start  # this alone says which tokens belong to the part
        if (rest, part) not in self._tables:
            pieces = tuple(self._pieces(rest, part))
            self._tables[rest, part] = (pieces, sum(piece.size_bytes for piece in pieces))
        return self._tables[rest, part]

    def _pieces(self, rest: int, name: PartName) -> Iterator[Piece]:
        offset = 0
        for index, layer in enumerate(self._layers):
            for part in layer.parts:
                piece = (
                    self._piece(rest, index, part, offset) if _PART_OF_EXTENT[part.extent] == name else None
                )
                if piece is not None:
                    offset += piece.size_bytes
                    yield piece

    def _piece(self, rest: int, layer: int, part: StatePart, offset: int) -> Piece | None:
        """Of a block whose chunk ends ``rest`` tokens after the block's start."""
        if part.extent == "constant":
            ends_chunk = rest <= BLOCK_TOKENS
            return Piece(layer, part.name, 0, 0, part.shape, part.dtype, offset) if ends_chunk else None
        first = 0 if part.window is None else max(0, rest - part.window)
        tokens = min(BLOCK_TOKENS, rest) - first
        if tokens <= 0:
            return None
        heads, dim = part.shape
        return Piece(layer, part.name, first, tokens, (heads, tokens, dim), part.dtype, offset)


class PromptParts:
    """The blocks of one prompt, by number from 0, and their parts. ``cuts`` are the ends of its chunks.

    ``lines`` are the chunk ends at which this prompt or one that goes on from it can be
    reused: all but the prompt's own end, and that if it is on the grid.
    """

    def __init__(self, layout: PartLayout, cuts: Sequence[int]) -> None:
        self.layout = layout
        self.blocks = prompt_blocks(cuts)
        ends = [*cuts[:-1], *(cut for cut in cuts[-1:] if cut % layout.grid_tokens == 0)]
        self._counts = dict.fromkeys(ends, 0)
        for number, block in enumerate(self.blocks):
            if block.end in self._counts:
                self._counts[block.end] = number + 1
        self.lines: tuple[int, ...] = tuple(ends)
        self.boundaries: tuple[int, ...] = tuple(cuts[:-1])
        """Where reuse of this prompt may end, in tokens: chunk ends that leave a token to compute."""

    def count(self, line: int) -> int:
        """How many blocks there are before a line."""
        return self._counts[line]

    def is_line(self, tokens: int) -> bool:
        return tokens in self._counts

    def pieces(self, block: int, part: PartName) -> tuple[Piece, ...]:
        """What the part of block number ``block`` is made of, in order; empty if it has none."""
        return self.layout.table(self.blocks[block], part)[0]

    def part_bytes(self, block: int, part: PartName) -> int:
        """Length of the packed part; 0 if the block has no such part."""
        return self.layout.table(self.blocks[block], part)[1]

    def needs_full(self, block: int) -> bool:
        """Whether a reuse needs this block's full part."""
        return self.part_bytes(block, "full") > 0

    def needs_at(self, line: int) -> tuple[tuple[int, PartName], ...]:
        """Besides full parts: the (block, part) that a reuse ending at this line needs."""
        last = first = self.count(line)
        while first > 0 and self.blocks[first - 1].end > line - self.layout.reach_tokens:
            first -= 1
        windows: list[tuple[int, PartName]] = [(block, "window") for block in range(first, last)]
        states: list[tuple[int, PartName]] = [(last - 1, "state")]
        return tuple(one for one in windows + states if self.part_bytes(*one))


_PART_OF_EXTENT: dict[str, PartName] = {"full": "full", "window": "window", "constant": "state"}
