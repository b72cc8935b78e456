"""The learning rate over a run whose length is given in time, not in steps."""

from __future__ import annotations

import time
from collections.abc import Callable

WARM_UP_STEPS = 300
FLAT_SHARE = 0.35
LAST_FACTOR = 0.01


class Schedule:
    """Rises over 300 steps, stays flat for 35 % of the time, then falls linearly to 1 %."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._start = clock()
        self._step = 0

    @property
    def elapsed_seconds(self) -> float:
        return self._clock() - self._start

    @property
    def is_over(self) -> bool:
        return self.elapsed_seconds >= self._seconds

    def next_factor(self) -> float:
        """The factor of the learning rate for the next step."""
        self._step += 1
        share = min(1.0, self.elapsed_seconds / self._seconds)
        falling = LAST_FACTOR + (1 - LAST_FACTOR) * (1 - share) / (1 - FLAT_SHARE)
        return min(1.0, self._step / WARM_UP_STEPS) * (1.0 if share < FLAT_SHARE else falling)
