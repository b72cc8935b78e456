"""The RAM tier's bytes, as a reservation in the model's share that grows on demand and gives way to anybody.

Always true: what the tier may hold is reserved, except for pinned parts while it shrinks;
no live request is refused memory that the tier could give.
"""

from __future__ import annotations

import threading

from darkbloom_core.memory import Share
from darkbloom_core.prefix import RamTier

PREFIX = "prefix cache"
"""The key of the reservation in the model's share; requests have other ids."""

DEFAULT_DIVISOR = 4
"""Without a limit of its own the tier may have this part of the grant: a quarter."""


class CacheBudget:
    """Thread-safe. ``most_bytes`` is all that ``ram`` may ever hold; None means a part of the grant."""

    def __init__(self, share: Share, ram: RamTier, most_bytes: int | None) -> None:
        self._share = share
        self._ram = ram
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._reserved_bytes = 0

    @property
    def most_bytes(self) -> int:
        """What the tier may hold if nobody else wants memory."""
        if self._most_bytes is not None:
            return min(self._most_bytes, self._share.limit_bytes)
        return self._share.limit_bytes // DEFAULT_DIVISOR

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    def grow(self, size_bytes: int) -> None:
        """So many bytes are about to be kept: reserve them, as far as there is room. What has none replaces others."""
        with self._lock:
            wanted = min(self.most_bytes, self._room(), self._ram.bytes_used + size_bytes)
            if wanted > self._reserved_bytes and self._share.hold(PREFIX, wanted):
                self._reserved_bytes = wanted
                self._ram.resize(wanted)

    def reserve(self, key: str, size_bytes: int) -> bool:
        """Reserve for a live request in the share; the tier gives way first, if that is enough."""
        with self._lock:
            if self._room() >= size_bytes:
                self._shrink(self._room() - size_bytes)
        return self._share.reserve(key, size_bytes)

    def fit(self) -> None:
        """Shrink to what the share leaves beside the others' reservations."""
        with self._lock:
            self._shrink(min(self.most_bytes, self._room()))

    def trim(self, size_bytes: int) -> int:
        """Drop parts of so many bytes, as far as they are not in use; gives the bytes that are free now."""
        with self._lock:
            before = self._ram.bytes_used
            self._shrink(before - size_bytes)
            return before - self._ram.bytes_used

    def close(self) -> None:
        """Nothing is kept from now on. What is pinned goes when it is let go."""
        with self._lock:
            self._most_bytes = 0
            self._shrink(0)

    def _room(self) -> int:
        """What the share leaves for the tier."""
        return self._share.limit_bytes - (self._share.reserved_bytes - self._reserved_bytes)

    def _shrink(self, size_bytes: int) -> None:
        size_bytes = max(0, size_bytes)
        if size_bytes < self._reserved_bytes:
            self._reserved_bytes = max(size_bytes, self._ram.resize(size_bytes))
            self._share.hold(PREFIX, self._reserved_bytes)
