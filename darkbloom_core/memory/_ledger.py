"""One ledger of reserved bytes: whoever is about to use memory reserves it here first.

Always true: the sum of reservations is never raised above the limit by ``reserve``;
``release`` is idempotent; a shrunk limit leaves existing reservations alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType


class Ledger:
    """Thread-safe. Keys are unique while reserved."""

    def __init__(self, limit_bytes: int) -> None:
        self._lock = threading.Lock()
        self._limit_bytes = max(0, limit_bytes)
        self._reservations: dict[str, int] = {}
        self._reserved_bytes = 0

    def reserve(self, key: str, size_bytes: int) -> bool:
        """Reserve ``size_bytes`` under ``key``; False if they do not fit now.

        Raises ``ValueError`` if the size is negative or the key is reserved already.
        """
        if size_bytes < 0:
            raise ValueError(f"cannot reserve {size_bytes} bytes")
        with self._lock:
            if key in self._reservations:
                raise ValueError(f"{key!r} is reserved already")
            if self._reserved_bytes + size_bytes > self._limit_bytes:
                return False
            self._reservations[key] = size_bytes
            self._reserved_bytes += size_bytes
            return True

    def release(self, key: str) -> None:
        """Give back what ``key`` holds; nothing happens if it holds nothing."""
        with self._lock:
            self._reserved_bytes -= self._reservations.pop(key, 0)

    def resize(self, limit_bytes: int) -> None:
        """Set the limit. Existing reservations stay; new ones succeed once they fit under it."""
        with self._lock:
            self._limit_bytes = max(0, limit_bytes)

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    def reservations(self) -> Mapping[str, int]:
        """A copy of the table."""
        with self._lock:
            return MappingProxyType(dict(self._reservations))
