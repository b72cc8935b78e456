"""What the next step does. Pure: no arrays, no clock, no I/O; a million steps run in a test.

Always true: a sequence that was admitted is never preempted; chunks are cut on a grid
from position 0 as a function of the prompt alone, and into parts as a function of the
chunk alone, so load decides when a chunk runs and never how it is cut; of two waiting
sequences of one priority the earlier goes first, and a higher priority is a bounded head
start, so nobody starves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from darkbloom_core.contracts import MediaSpan
from darkbloom_core.engine._sequence import Sequence
from darkbloom_core.engine._spans import picture_runs

PRIORITY_ARRIVALS = 64
"""One level of priority is a head start of this many arrivals: of those that come later still, none overtakes."""


SMALL_PICTURE = 4
"""Pictures smaller than this part of the largest one are taken to be as slow: small work has a cost of its own."""


PART_KEYS = 512
"""A chunk whose last token sees no more keys than this, itself among them, is not cut into parts."""

PART_WORK = 256 * PART_KEYS
"""Tokens times keys of one part: those of a chunk of 256 tokens that ends at ``PART_KEYS``."""

LEAST_PART_TOKENS = 16
"""No part has fewer tokens than this: a layer reads all its weights for each."""


def chunk_end(start: int, prompt_tokens: int, grid: int, spans: tuple[MediaSpan, ...] = ()) -> int:
    """Where the chunk that starts at ``start`` ends: the next grid line, the prompt's end, or past a picture.

    A cut inside a run of pictures moves to its beginning, or past its end if the chunk
    begins there: only then is a chunk longer than the grid.
    """
    end = min(prompt_tokens, start - start % grid + grid)
    for first, last in picture_runs(spans):
        if first < end < last:
            return first if first > start else last
    return end


def chunk_parts(start: int, end: int, *, on_cpu: bool) -> int:
    """How many parts tokens ``start`` to ``end - 1`` go through each layer in: on a CPU, more the deeper they stand.

    Pure, for what a chunk computes must not depend on times or load. A power of two, so that
    tokens times keys of a part stay about ``PART_WORK``, as far as ``LEAST_PART_TOKENS`` lets it.
    """
    tokens, parts = end - start, 1
    if on_cpu and end > PART_KEYS:
        while tokens * end > parts * PART_WORK and tokens >= 2 * parts * LEAST_PART_TOKENS:
            parts *= 2
    return parts


PartShare: TypeAlias = Callable[[int, int, int], float]
"""Of a layer, a part's tokens and the keys at its chunk's end: what the part takes of a slice."""


def _all_of_it(_layer: int, _tokens: int, _keys: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class ChunkSlice:
    """Layers ``first_layer`` to ``last_layer - 1`` of tokens ``start`` to ``end - 1`` of a prompt.

    Several sequences are a pack: whole prompts, from token 0 to their own ends, of which
    ``end`` is the latest.

    A chunk of several ``parts`` goes through each layer part by part before the next layer
    begins. The slice leaves out the first ``first_part`` parts of ``first_layer``, and has the
    first ``last_part`` parts of ``last_layer`` besides. Both are 0 in a chunk of one part.
    """

    sequences: tuple[Sequence, ...]
    start: int
    end: int
    first_layer: int
    last_layer: int
    parts: int = 1
    first_part: int = 0
    last_part: int = 0

    @property
    def is_pack(self) -> bool:
        return len(self.sequences) > 1

    @property
    def tokens(self) -> int:
        """How many tokens the chunk or pack has, padding included."""
        return (self.end - self.start) * len(self.sequences)

    @property
    def part_tokens(self) -> int:
        """The tokens of its longest part."""
        return -(-(self.end - self.start) // self.parts)

    @property
    def part_bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each part of the chunk starts and ends, in order: as long as each other, to a token."""
        cuts = [self.start + (self.end - self.start) * part // self.parts for part in range(self.parts + 1)]
        return tuple(pairwise(cuts))

    def up_to(self, layer: int, part: int) -> ChunkSlice:
        """The slice that follows this one and ends before ``part`` of ``layer``."""
        return replace(
            self, first_layer=self.last_layer, first_part=self.last_part, last_layer=layer, last_part=part
        )

    def pieces(self) -> Iterator[ChunkSlice]:
        """What runs at once, in order: one part of one layer each, or all of it in a chunk of one part."""
        if self.parts == 1:
            yield self
            return
        first = self.first_layer * self.parts + self.first_part
        last = self.last_layer * self.parts + self.last_part
        piece = replace(self, last_layer=self.first_layer, last_part=self.first_part)
        for done in range(first + 1, last + 1):
            piece = piece.up_to(*divmod(done, self.parts))
            yield piece


@dataclass(frozen=True, slots=True)
class TowerSlice:
    """Layers ``first_layer`` to ``last_layer - 1`` of the tower, for one picture of a prompt.

    ``starts``: what comes before the first layer runs, too, and counts as one.
    """

    sequence: Sequence
    picture: int
    first_layer: int
    last_layer: int
    starts: bool = False

    @property
    def tokens(self) -> int:
        """The picture's soft tokens."""
        return next(span.length for span in self.sequence.spans if span.picture == self.picture)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the rows that decode a token, and at most one slice of one chunk or of one picture."""

    decode: tuple[Sequence, ...]
    prefill: ChunkSlice | TowerSlice | None

    @property
    def is_empty(self) -> bool:
        return not self.decode and self.prefill is None


class Scheduler:
    """Running and waiting sequences of one engine."""

    def __init__(
        self,
        *,
        max_rows: int,
        layers: int,
        grid: int,
        pack_tokens: int = 0,
        tower_layers: int = 0,
        picture_tokens: int = 1,
        on_cpu: bool = False,
    ) -> None:
        """``grid`` is the chunk size. Prompts shorter than a chunk run together while the
        padded pack stays within ``pack_tokens`` tokens; 0 runs every prompt by itself.
        The largest picture has ``picture_tokens`` soft tokens."""
        self._max_rows = max_rows
        self._layers = layers
        self._grid = grid
        self._pack_tokens = pack_tokens
        self._tower_layers = tower_layers
        self._picture_tokens = picture_tokens
        self._on_cpu = on_cpu
        self._arrivals = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._chunk: ChunkSlice | None = None
        self._tower: TowerSlice | None = None

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it stands."""
        if self._chunk is not None and sequence in self._chunk.sequences:
            rest = tuple(one for one in self._chunk.sequences if one is not sequence)
            self._chunk = replace(self._chunk, sequences=rest) if rest else None
        if self._tower is not None and self._tower.sequence is sequence:
            self._tower = None
        for rows in (self._waiting, self._running):
            if sequence in rows:
                rows.remove(sequence)

    def admit(self, reserve: Callable[[Sequence], bool]) -> tuple[Sequence, ...]:
        """Move waiting sequences to running, best first, until one does not fit.

        ``reserve`` takes the worst case of a sequence from the ledger. It is asked in
        order and nobody is skipped, so a large sequence is not starved by small ones.
        """
        admitted: list[Sequence] = []
        self._waiting.sort(key=self._rank)
        while self._waiting and len(self._running) < self._max_rows:
            if not reserve(self._waiting[0]):
                break
            sequence = self._waiting.pop(0)
            self._running.append(sequence)
            admitted.append(sequence)
        return tuple(admitted)

    def plan(
        self,
        layers_per_slice: int,
        tower_layers_per_slice: int = 1,
        part_share: PartShare = _all_of_it,
    ) -> Plan:
        """The next step. Between two decode steps at most so many layers of a chunk, or of the tower, run.

        The numbers are for a chunk of the grid's size, and for the largest picture: of what is
        longer fewer layers run at a time, of a small picture more. Of a chunk in parts as many
        run as fit, at least one.
        """
        decode = tuple(sequence for sequence in self._running if sequence.wants_decode)
        piece = self._next_slice(layers_per_slice, tower_layers_per_slice, part_share, is_alone=not decode)
        return Plan(decode, piece)

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.arrival - PRIORITY_ARRIVALS * sequence.priority, sequence.arrival)

    def _next_slice(
        self, layers: int, tower_layers: int, part_share: PartShare, *, is_alone: bool
    ) -> ChunkSlice | TowerSlice | None:
        if self._chunk is None and self._tower is None:
            prefilling = [row for row in self._running if row.wants_prefill]
            if not prefilling:
                return None
            self._begin(self._first_slice(sorted(prefilling, key=self._rank)))
        if self._tower is not None:
            size = max(self._tower.tokens, self._picture_tokens // SMALL_PICTURE)
            fitting = tower_layers * self._picture_tokens // max(1, size)
            return self._next_of_tower(self._tower, self._tower_layers + 1 if is_alone else fitting)
        chunk = self._chunk
        assert chunk is not None
        if is_alone:
            piece = chunk.up_to(self._layers, 0)
        elif chunk.parts > 1:
            piece = self._next_parts(chunk, part_share)
        else:
            fitting = layers * self._grid // max(self._grid, chunk.tokens)
            piece = chunk.up_to(min(self._layers, chunk.last_layer + max(1, fitting)), 0)
        self._chunk = None if piece.last_layer == self._layers else piece
        return piece

    def _next_parts(self, chunk: ChunkSlice, share: PartShare) -> ChunkSlice:
        """As many parts as fit into a slice, of this layer and then of the next."""
        done = chunk.last_layer * chunk.parts + chunk.last_part + 1
        taken = share(chunk.last_layer, chunk.part_tokens, chunk.end)
        while done < self._layers * chunk.parts:
            taken += share(done // chunk.parts, chunk.part_tokens, chunk.end)
            if taken > 1:
                break
            done += 1
        return chunk.up_to(*divmod(done, chunk.parts))

    def _begin(self, chunk: ChunkSlice) -> None:
        """``chunk`` is next, or first the tower for the next of its pictures that is unseen."""
        for sequence in chunk.sequences:
            for span in sequence.spans:
                if chunk.start <= span.start < chunk.end and span.picture in sequence.unseen:
                    self._tower = TowerSlice(sequence, span.picture, 0, 0, starts=True)
                    return
        self._chunk = chunk

    def _next_of_tower(self, tower: TowerSlice, layers: int) -> TowerSlice:
        first = tower.last_layer
        last = min(self._tower_layers, first + max(1, layers) - tower.starts)
        piece = replace(tower, first_layer=first, last_layer=last)
        self._tower = None if last == self._tower_layers else replace(piece, starts=False)
        if self._tower is None:
            tower.sequence.unseen.discard(tower.picture)
        return piece

    def _first_slice(self, prefilling: list[Sequence]) -> ChunkSlice:
        """The next chunk, before its first layer: of the best sequence, and of what can be packed with it."""
        best = prefilling[0]
        pack = [row for row in prefilling if self._is_short(row)] if self._is_short(best) else []
        longest = 0
        for count, row in enumerate(pack, 1):
            longest = max(longest, row.prompt_tokens)
            if count * longest > self._pack_tokens:
                pack = pack[: count - 1]
                break
        if len(pack) > 1:
            return ChunkSlice(tuple(pack), 0, max(row.prompt_tokens for row in pack), 0, 0)
        end = chunk_end(best.prefilled, best.prompt_tokens, self._grid, best.spans)
        has_picture = any(best.prefilled <= span.start < end for span in best.spans)
        parts = 1 if has_picture else chunk_parts(best.prefilled, end, on_cpu=self._on_cpu)
        return ChunkSlice((best,), best.prefilled, end, 0, 0, parts)

    def _is_short(self, sequence: Sequence) -> bool:
        """Whether prefix reuse can never see the prompt: it has not one whole chunk, and no picture."""
        return sequence.prefilled == 0 and sequence.prompt_tokens < self._grid and not sequence.spans
