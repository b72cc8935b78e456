"""Gives MLX's cached memory back when somebody was refused for want of it; never on the caller's thread.

Always true: at most one flush in ``FLUSH_SECONDS``, and none that would not help.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from darkbloom_core.memory._policy import GIB
from darkbloom_core.memory._readings import Readings

FLUSH_SECONDS = 1.0
SWEEP_SECONDS = 30.0
SWEEP_BYTES = 2 * GIB
"""From this size on, a cache is emptied even if nobody was refused."""


class FlushRule:
    """When to flush: pure, on a clock that is passed in."""

    def __init__(self) -> None:
        self._flushed_at: float | None = None

    def seconds_to_wait(self, now: float) -> float:
        """Until a flush is allowed again."""
        return 0.0 if self._flushed_at is None else max(0.0, self._flushed_at + FLUSH_SECONDS - now)

    def allows(self, now: float, cached_bytes: int, shortfall_bytes: int | None) -> bool:
        """Whether to flush now; ``shortfall_bytes`` is what a refused caller lacked, None for a sweep."""
        least = SWEEP_BYTES if shortfall_bytes is None else max(1, shortfall_bytes)
        return cached_bytes >= least and self.seconds_to_wait(now) == 0

    def flushed(self, now: float) -> None:
        self._flushed_at = now


class Reclaimer:
    """A thread that flushes. ``on_flushed`` is called after each flush.

    ``give_up`` is told before it how many bytes somebody lacked: whoever keeps what it can do
    without drops as much now.
    """

    def __init__(
        self,
        readings: Readings,
        on_flushed: Callable[[], None] = lambda: None,
        give_up: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._readings = readings
        self._on_flushed = on_flushed
        self._give_up = give_up
        self._rule = FlushRule()
        self._changed = threading.Condition()
        self._shortfall_bytes: int | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="memory reclaimer", daemon=True)
        self._thread.start()

    def want(self, shortfall_bytes: int) -> None:
        """Somebody lacked this many bytes. Returns at once."""
        with self._changed:
            self._shortfall_bytes = min(shortfall_bytes, self._shortfall_bytes or shortfall_bytes)
            self._changed.notify()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._shortfall_bytes is None and not self._closed:
                    self._changed.wait(SWEEP_SECONDS)
                pause = self._rule.seconds_to_wait(time.monotonic())
                if pause > 0 and not self._closed:
                    self._changed.wait_for(lambda: self._closed, pause)
                if self._closed:
                    return
                shortfall, self._shortfall_bytes = self._shortfall_bytes, None
            if shortfall is not None:
                self._give_up(shortfall)
            if self._rule.allows(time.monotonic(), self._readings.read("device").cached_bytes, shortfall):
                self._readings.clear_cache()
                self._rule.flushed(time.monotonic())
                with self._changed:
                    self._shortfall_bytes = None  # who was refused before is told now, and asks again
                self._on_flushed()
