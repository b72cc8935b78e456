"""The table of live requests, shared between callers' threads and the engine's.

Always true: an id is on the table from ``enter`` until ``leave``; nothing enters a
draining desk; whatever may let the engine move on wakes it.
"""

from __future__ import annotations

import threading

from darkbloom_core.engine._live import Live
from darkbloom_core.errors import Draining, InvalidRequest, QueueFull


class Desk:
    """Thread-safe. ``limit`` is how many requests may be live, waiting or running."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._changed = threading.Condition()
        self._lives: dict[str, Live] = {}
        self._arrived: list[Live] = []
        self._news = False
        self.draining = False
        self.closing = False

    # --- callers -------------------------------------------------------------------

    def enter(self, live: Live) -> None:
        """Raises ``Draining``, ``InvalidRequest`` for a live id, or ``QueueFull``."""
        with self._changed:
            if self.draining:
                raise Draining("the server is shutting down")
            if live.request.id in self._lives:
                raise InvalidRequest(
                    f"a request with the id {live.request.id!r} is running already", param="id"
                )
            if len(self._lives) >= self._limit:
                raise QueueFull(f"{self._name} has {len(self._lives)} requests running and waiting")
            self._lives[live.request.id] = live
            self._arrived.append(live)
            self._notify()

    def wake(self) -> None:
        """Something changed that may let the engine move on."""
        with self._changed:
            self._notify()

    def drain(self) -> None:
        with self._changed:
            self.draining = True

    def close(self) -> None:
        with self._changed:
            self.draining = self.closing = True
            self._notify()

    def __len__(self) -> int:
        return len(self._lives)

    # --- the engine's thread ---------------------------------------------------------

    def wait(self, seconds: float | None) -> None:
        """Return when there is news, or after ``seconds``."""
        with self._changed:
            if not self._news:
                self._changed.wait(seconds)

    def take_arrivals(self) -> list[Live]:
        """Those that entered since the last call; the news is read with them."""
        with self._changed:
            self._news = False
            arrived, self._arrived = self._arrived, []
        return arrived

    def lives(self) -> tuple[Live, ...]:
        with self._changed:
            return tuple(self._lives.values())

    def find(self, request_id: str) -> Live | None:
        return self._lives.get(request_id)

    def leave(self, live: Live) -> bool:
        """Take ``live`` off; False if somebody else has."""
        with self._changed:
            if self._lives.get(live.request.id) is not live:
                return False
            del self._lives[live.request.id]
            if live in self._arrived:
                self._arrived.remove(live)
            return True

    def clear(self) -> tuple[Live, ...]:
        """Take everybody off, and let nobody enter any more."""
        with self._changed:
            self.draining = True
            lives, self._lives, self._arrived = tuple(self._lives.values()), {}, []
        return lives

    def _notify(self) -> None:
        self._news = True
        self._changed.notify_all()
