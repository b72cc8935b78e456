"""Whole lives of many sequences, played on the scheduler and the ledger without a model. Pure: a seed says it all.

Sequences arrive in quiet, busy and flooded times, are cancelled, paused, packed, and the
memory they share grows and shrinks. A flood is the worst there can be: every free place in
the queue goes to an urgent sequence of the largest size at once, memory is short, and
prefills run a layer at a time.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from darkbloom_core.contracts import MediaSpan
from darkbloom_core.engine._scheduler import PRIORITY_ARRIVALS, Plan, Scheduler, chunk_end
from darkbloom_core.engine._sequence import Sequence
from darkbloom_core.memory import Ledger

ROWS = 8
LAYERS = 4
GRID = 64
QUEUE = 32
PRIORITIES = (0, 1, 2)
LONGEST_PROMPT = 150
MOST_TOKENS = 40
MOST_PAUSED_STEPS = 20
BUDGETS = (760, 1500, 3000)
TIMES = (("quiet", 1000, 0.01), ("busy", 3000, 0.3), ("flood", 8000, 1.0))
"""Kinds of times in turn: steps of one, and the chance of an arrival in a step."""


def longest_wait() -> int:
    """The most steps that a sequence can wait for its row.

    While one waits, only so many others can have a row: the ``ROWS`` that have one when it
    comes, the ``QUEUE - 1`` that wait already, and of those that come later at most
    ``PRIORITY_ARRIVALS`` for each level of priority between the lowest and the highest,
    for a priority is a head start of that many arrivals. Nobody else overtakes, since the
    head of the queue is never skipped.

    A step that runs a slice of a prefill uses up one of their slices: at most ``LAYERS`` for
    each chunk, and a prompt has at most one chunk for each piece of the grid and two more
    for the ends of a span.

    A step that runs none uses up a token, or a step of a pause, of every row there is: a row
    that does not prefill decodes or is paused. All ``ROWS`` rows are taken, or memory is
    short, and then at least as many rows run as the longest sequences fit into the smallest
    budget.
    """
    levels = max(PRIORITIES) - min(PRIORITIES)
    others = ROWS + QUEUE - 1 + PRIORITY_ARRIVALS * levels
    slices = LAYERS * (-(-LONGEST_PROMPT // GRID) + 2)
    fewest_rows = min(ROWS, min(BUDGETS) // (LONGEST_PROMPT + MOST_TOKENS))
    return others * slices + others * (MOST_TOKENS + MOST_PAUSED_STEPS) // fewest_rows


@dataclass
class Life:
    """What happened. Waits are in steps, from arrival to a row, a cancellation, or the end of the play."""

    arrived: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    longest_wait: int = 0
    largest_pack: int = 0
    reserved_bytes: int = 0


class _Play:
    def __init__(self, seed: int, packed: bool) -> None:
        self.life = Life()
        self._chance = random.Random(seed)
        pack_tokens = 2 * GRID if packed else 0
        self._scheduler = Scheduler(max_rows=ROWS, layers=LAYERS, grid=GRID, pack_tokens=pack_tokens)
        self._share = Ledger(clock=lambda: 0.0).share("life", max(BUDGETS))
        self._arrived_at: dict[str, int] = {}
        self._paused_steps: Counter[str] = Counter()
        self._starts: dict[str, list[int]] = {}

    def step(self, step: int, arrivals: float, flood: bool) -> None:
        chance, scheduler = self._chance, self._scheduler
        if chance.random() < arrivals and len(scheduler.waiting) < QUEUE:
            self._arrive(step, self._largest() if flood else self._any())
        if chance.random() < 0.01 and (scheduler.running or scheduler.waiting):
            self.life.cancelled += 1
            self._end(chance.choice(scheduler.running + scheduler.waiting), step)
        if flood:
            self._share.resize(min(BUDGETS))
        elif chance.random() < 0.001:
            self._share.resize(chance.choice(BUDGETS))
        self._pause()
        for sequence in scheduler.admit(self._reserve):
            self._waited(sequence, step)
        self._run(scheduler.plan(1 if flood else chance.randint(1, LAYERS)))
        for sequence in scheduler.running:
            if sequence.launched == sequence.max_tokens:
                self._end(sequence, step)

    def end_all(self, step: int) -> None:
        for sequence in self._scheduler.running + self._scheduler.waiting:
            self._end(sequence, step)
        self.life.reserved_bytes = self._share.reserved_bytes

    def _arrive(self, step: int, sequence: Sequence) -> None:
        self.life.arrived += 1
        self._arrived_at[sequence.id] = step
        self._scheduler.add(sequence)

    def _any(self) -> Sequence:
        chance = self._chance
        prompt = chance.randint(1, LONGEST_PROMPT)
        spans = ()
        if chance.random() < 0.1 and prompt > 2:
            start = chance.randrange(prompt - 1)
            spans = (MediaSpan(start, chance.randint(1, prompt - start - 1), 0),)
        tokens, priority = chance.randint(1, MOST_TOKENS), chance.choice(PRIORITIES)
        return Sequence(str(self.life.arrived), prompt, tokens, priority, spans)

    def _largest(self) -> Sequence:
        return Sequence(str(self.life.arrived), LONGEST_PROMPT, MOST_TOKENS, max(PRIORITIES))

    def _reserve(self, sequence: Sequence) -> bool:
        return self._share.reserve(sequence.id, sequence.prompt_tokens + sequence.max_tokens)

    def _waited(self, sequence: Sequence, step: int) -> None:
        waited = step - self._arrived_at.pop(sequence.id)
        self.life.longest_wait = max(self.life.longest_wait, waited)

    def _pause(self) -> None:
        for sequence in self._scheduler.running:
            if self._paused_steps[sequence.id] >= MOST_PAUSED_STEPS:
                sequence.paused = False
            elif self._chance.random() < 0.02:
                sequence.paused = not sequence.paused
            self._paused_steps[sequence.id] += sequence.paused

    def _run(self, plan: Plan) -> None:
        for sequence in plan.decode:
            assert not sequence.is_prefilling
            assert not sequence.paused
            sequence.launched += 1
        piece = plan.prefill
        if piece is None:
            return
        self.life.largest_pack = max(self.life.largest_pack, len(piece.sequences))
        for sequence in piece.sequences:
            assert sequence in self._scheduler.running
            assert piece.start == sequence.prefilled
            if piece.last_layer == LAYERS:
                self._starts.setdefault(sequence.id, []).append(piece.start)
                sequence.prefilled = min(piece.end, sequence.prompt_tokens)
                sequence.launched = int(not sequence.is_prefilling)

    def _end(self, sequence: Sequence, step: int) -> None:
        self._scheduler.remove(sequence)
        self._share.release(sequence.id)
        self.life.ends[sequence.id] += 1
        if sequence.id in self._arrived_at:
            self._waited(sequence, step)
        self._paused_steps.pop(sequence.id, None)
        starts = self._starts.pop(sequence.id, [])
        assert starts == chunk_starts(sequence)[: len(starts)], "load has changed how a prompt was cut"


def chunk_starts(sequence: Sequence) -> list[int]:
    """Where the chunks of a sequence's prompt begin, as a function of the prompt alone."""
    start, starts = 0, []
    while start < sequence.prompt_tokens:
        starts.append(start)
        start = chunk_end(start, sequence.prompt_tokens, GRID, sequence.spans)
    return starts


def play(steps: int, seed: int, *, packed: bool) -> Life:
    """``steps`` steps of quiet, busy and flooded times in turn; whatever is left at the end is ended."""
    played, step = _Play(seed, packed), 0
    while step < steps:
        for name, length, arrivals in TIMES:
            until = min(step + length, steps)
            for now in range(step, until):
                played.step(now, arrivals, name == "flood")
            step = until
    played.end_all(steps)
    return played.life
