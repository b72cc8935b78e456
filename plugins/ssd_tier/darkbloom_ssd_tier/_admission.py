"""Which parts are worth writing: those of prompts that come back, and a bounded share of those that might.

Most prompts never come back, and writing them all wears a disk out for nothing. So a part is
written when its prompt is seen for the second time within a window; first sights get a share
of the day's bytes. Pure but for its memory of names. Thread-safe.

Always true: no more is admitted than the budget leaves, what waits to be written included.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeAlias

from darkbloom_ssd_tier._accounts import Hour

MOST_REMEMBERED = 1 << 17
"""Names of 32 bytes: about 20 MB of memory when it is full."""

Sight: TypeAlias = Literal["first", "again"]


@dataclass(frozen=True, slots=True)
class DayBudget:
    """Bytes that may be written in 24 hours, and those of them for first sights."""

    bytes_per_day: int
    first_bytes_per_day: int

    def allows(self, spent: Hour, size_bytes: int, sight: Sight) -> bool:
        """Whether so many bytes more may be written after ``spent``."""
        if sight == "first" and spent.first_bytes + size_bytes > self.first_bytes_per_day:
            return False
        return spent.written_bytes + size_bytes <= self.bytes_per_day


class Sights:
    """Names of parts whose prompts were seen, each for ``window_seconds``, the latest ``most``."""

    def __init__(self, window_seconds: float, most: int = MOST_REMEMBERED) -> None:
        self._window_seconds = window_seconds
        self._most = most
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    def sight(self, name: bytes, now: float) -> Sight:
        """Whether the part was seen before."""
        with self._lock:
            return self._sight(name, now)

    def see(self, name: bytes, now: float) -> Sight:
        """A prompt with this part was seen now; gives whether it was before."""
        with self._lock:
            found = self._sight(name, now)
            self._seen[name] = now
            self._seen.move_to_end(name)
            while len(self._seen) > self._most:
                self._seen.popitem(last=False)
            return found

    def _sight(self, name: bytes, now: float) -> Sight:
        seen = self._seen.get(name)
        return "first" if seen is None or now - seen > self._window_seconds else "again"

    def __len__(self) -> int:
        return len(self._seen)
