"""What the next step does. Pure: no arrays, no clock, no I/O; a million steps run in a test.

Always true: a sequence that was admitted is never preempted; chunks are cut on a grid
from position 0 as a function of the prompt alone, so load decides when a chunk runs and
never how it is cut; of two waiting sequences of one priority the earlier goes first, and a
higher priority is a bounded head start, so nobody starves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from darkbloom_core.contracts import MediaSpan
from darkbloom_core.engine._sequence import Sequence

PRIORITY_ARRIVALS = 64
"""One level of priority is a head start of this many arrivals: of those that come later still, none overtakes."""


def chunk_end(start: int, prompt_tokens: int, grid: int, spans: tuple[MediaSpan, ...] = ()) -> int:
    """Where the chunk that starts at ``start`` ends: the next grid line, the prompt's end, or past a span.

    A chunk never splits a span: a cut inside one moves to the span's start, or past its
    end if the chunk starts there.
    """
    end = min(prompt_tokens, start - start % grid + grid)
    for span in spans:
        if span.start < end < span.start + span.length:
            end = span.start if span.start > start else span.start + span.length
    return end


@dataclass(frozen=True, slots=True)
class ChunkSlice:
    """Layers ``first_layer`` to ``last_layer - 1`` of the chunk ``start`` to ``end - 1`` of a prompt."""

    sequence: Sequence
    start: int
    end: int
    first_layer: int
    last_layer: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the rows that decode a token, and at most one slice of one chunk."""

    decode: tuple[Sequence, ...]
    prefill: ChunkSlice | None

    @property
    def is_empty(self) -> bool:
        return not self.decode and self.prefill is None


class Scheduler:
    """Running and waiting sequences of one engine."""

    def __init__(self, *, max_rows: int, layers: int, grid: int) -> None:
        self._max_rows = max_rows
        self._layers = layers
        self._grid = grid
        self._arrivals = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._chunk: ChunkSlice | None = None

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
        if self._chunk is not None and self._chunk.sequence is sequence:
            self._chunk = None
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

    def plan(self, layers_per_slice: int) -> Plan:
        """The next step. Between two decode steps at most ``layers_per_slice`` layers of a chunk run."""
        decode = tuple(sequence for sequence in self._running if sequence.wants_decode)
        return Plan(decode, self._next_slice(layers_per_slice if decode else self._layers))

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.arrival - PRIORITY_ARRIVALS * sequence.priority, sequence.arrival)

    def _next_slice(self, layers: int) -> ChunkSlice | None:
        if self._chunk is None:
            prefilling = [row for row in self._running if row.is_prefilling and not row.paused]
            if not prefilling:
                return None
            sequence = min(prefilling, key=self._rank)
            start = sequence.prefilled
            end = chunk_end(start, sequence.prompt_tokens, self._grid, sequence.spans)
            self._chunk = ChunkSlice(sequence, start, end, 0, 0)
        chunk = self._chunk
        first = chunk.last_layer
        piece = ChunkSlice(
            chunk.sequence, chunk.start, chunk.end, first, min(self._layers, first + max(1, layers))
        )
        self._chunk = None if piece.last_layer == self._layers else piece
        return piece
