"""A model's folder while it is in use: open, and locked if this process is the one that writes there.

Always true: at most one process has the lock; the directory stays open as long as anybody
reads or writes in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

from darkbloom_ssd_tier._folder import LOCK


class Home:
    """Takes over the open directory ``handle``. Thread-safe."""

    def __init__(self, name: str, handle: int) -> None:
        self.name = name
        self._handle = handle
        self._guard = threading.Lock()
        self._lock: int | None = None
        self._users = 1
        self.tiers = 0

    @property
    def is_owned(self) -> bool:
        """Whether this process writes here."""
        return self._lock is not None

    def own(self) -> bool:
        """Take the lock if nobody has it; whether this process has it then."""
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._guard:
            if self._lock is not None or self._users == 0:
                return self._lock is not None
            try:
                lock = os.open(LOCK, flags, 0o600, dir_fd=self._handle)
            except OSError:
                return False
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            self._lock = lock
            return True

    @contextlib.contextmanager
    def used(self) -> Iterator[int]:
        """The directory, which stays open meanwhile. Raises ``OSError`` if it is closed already."""
        with self._guard:
            if self._users == 0:
                raise OSError("the folder is closed")
            self._users += 1
        try:
            yield self._handle
        finally:
            self._release()

    def close(self) -> None:
        """Let the lock go now, and the directory once nobody uses it any more. To be called once."""
        with self._guard:
            lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        self._release()

    def _release(self) -> None:
        with self._guard:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            os.close(self._handle)
