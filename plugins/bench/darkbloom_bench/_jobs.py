"""One run of a workload: what is asked for and when, and what came back and when.

Both sides of a comparison are driven by the same ``Recorder``, so that they meet the same
arrivals and end at the same point. Always true: arrivals are counted in tokens that the
side itself has produced, never in seconds, so a slow side and a fast one are asked for the
same mix of rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes once the run has produced ``after_tokens`` tokens, or at once if no row is live."""

    prompt: tuple[int, ...]
    max_tokens: int
    after_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """The requests of one run, in order of arrival.

    The run is over when every row has ended; or, if ``hold_tokens`` is given, as soon as
    every row has produced that many tokens since the last of them began.
    """

    arrivals: tuple[Arrival, ...]
    hold_tokens: int | None = None


@dataclass(slots=True)
class Trace:
    """What happened in a run, by row; times in seconds of the recorder's clock."""

    started: float
    submitted: list[float] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


class Recorder:
    """Follows a run as it happens. ``token`` may be called from another thread than the rest.

    ``ended_early`` names a row that reached its ``max_tokens`` before a held run was over:
    the run is of no use then, and is over.
    """

    def __init__(self, job: Job, clock: Clock = time.perf_counter) -> None:
        self.job = job
        self.trace = Trace(clock())
        self.ended_early: int | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._produced = 0
        self._live = 0
        self._begun = 0
        self._missing: list[int] | None = None
        self._rows_short = len(job.arrivals)
        self._over = False

    @property
    def is_over(self) -> bool:
        return self._over

    def take_due(self) -> range:
        """The rows whose time has come; the caller submits them now."""
        with self._lock:
            first = len(self.trace.submitted)
            while self._is_due():
                self.trace.submitted.append(self._clock())
                self.trace.times.append([])
                self.trace.tokens.append([])
                self._live += 1
            return range(first, len(self.trace.submitted))

    def token(self, row: int, token: int) -> bool:
        """Take one token of ``row``; true if the caller of ``take_due`` has something to do now."""
        now = self._clock()
        with self._lock:
            times = self.trace.times[row]
            times.append(now)
            self.trace.tokens[row].append(token)
            self._produced += 1
            ended = len(times) == self.job.arrivals[row].max_tokens
            self._live -= ended
            if self.job.hold_tokens is not None:
                self._count_held(row, self.job.hold_tokens, first=len(times) == 1)
                if ended and not self._over:
                    self.ended_early, self._over = row, True
            elif ended:
                self._row_has_enough()
            return self._over or self._is_due()

    def _count_held(self, row: int, hold: int, *, first: bool) -> None:
        if self._missing is not None:
            self._missing[row] -= 1
            if self._missing[row] == 0:
                self._row_has_enough()
        elif first:
            self._begun += 1
            if self._begun == len(self.job.arrivals):
                self._missing = [hold] * self._begun

    def _row_has_enough(self) -> None:
        self._rows_short -= 1
        self._over = self._over or self._rows_short == 0

    def _is_due(self) -> bool:
        """Called with the lock held."""
        index = len(self.trace.submitted)
        if index == len(self.job.arrivals):
            return False
        return self._live == 0 or self.job.arrivals[index].after_tokens <= self._produced
