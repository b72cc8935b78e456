"""What one API key may ask for: so many requests at once, and so many in a minute.

Always true: what one key does changes nothing for another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from darkbloom_core.errors import ConcurrencyLimitExceeded, RateLimitExceeded
from darkbloom_core.settings import ServerSettings


class TokenBucket:
    """Holds up to ``burst`` tokens, and gets ``per_second`` more each second. Times are seconds of any one clock."""

    def __init__(self, burst: int, per_second: float, now: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._tokens = float(burst)
        self._then = now

    def take(self, now: float) -> float:
        """Take a token: 0 if there was one, else nothing is taken and it is the seconds until there will be."""
        elapsed = max(0.0, now - self._then)
        self._tokens = min(self._burst, self._tokens + elapsed * self._per_second)
        self._then = max(now, self._then)
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_second


class KeyLimits:
    """The limits that ``settings`` put on each key. It lives on the server's event loop."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._concurrency = settings.key_concurrency
        self._per_minute = settings.key_requests_per_minute
        self._burst = settings.key_burst
        self._clock = clock
        self._running: dict[str, int] = {}
        self._buckets: dict[str, TokenBucket] = {}

    def running(self, name: str) -> int:
        """How many requests of the key ``name`` are being answered."""
        return self._running.get(name, 0)

    def enter(self, name: str) -> None:
        """Another request of the key ``name`` begins; ``leave`` says that it has ended.

        Raises ``ConcurrencyLimitExceeded`` or ``RateLimitExceeded``, and then it has not begun;
        what is refused for the first does not count for the second.
        """
        running = self.running(name)
        if self._concurrency and running >= self._concurrency:
            raise ConcurrencyLimitExceeded(
                f"{running} requests of this API key are being answered, and no more than "
                f"{self._concurrency} may be at once: wait for one of them"
            )
        self._take(name)
        self._running[name] = running + 1

    def leave(self, name: str) -> None:
        """A request of the key ``name`` has ended, in whatever way."""
        self._running[name] -= 1

    def _take(self, name: str) -> None:
        if not self._per_minute:
            return
        now = self._clock()
        bucket = self._buckets.setdefault(name, TokenBucket(self._burst, self._per_minute / 60, now))
        wait = bucket.take(now)
        if wait > 0:
            raise RateLimitExceeded(
                f"this API key may ask {self._per_minute:g} times a minute",
                retry_after_seconds=max(1, math.ceil(wait)),
            )
