"""Writing behind: parts wait in bounded memory for one thread that writes them at a bounded rate.

Always true: whoever offers a part never waits; what does not fit is dropped and counted;
what waits is reserved; after an error of the disk nothing is written for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from darkbloom_ssd_tier._accounts import Hour
from darkbloom_ssd_tier._admission import Sight
from darkbloom_ssd_tier._format import file_bytes
from darkbloom_ssd_tier._home import Home

log = logging.getLogger("darkbloom.ssd-tier")

FLUSH_SECONDS = 5.0
"""How long closing a model's tier goes on writing what waits."""

Drop: TypeAlias = Literal["pressure", "memory", "budget", "room", "space", "pause", "error", "closed"]
"""Why a part was not written: the queue is full, no memory was to be had, the day's bytes are used up, the
cache has no room, the disk is nearly full, an error was not long ago, this write failed, or the tier closed."""


@dataclass(slots=True, eq=False)
class Account:
    """What one tier has waiting. ``reserve`` is told how many bytes, before they are more; ``on_rest`` what was written."""

    home: Home
    reserve: Callable[[int], bool]
    on_rest: Callable[[Run], None]
    queue_bytes: int
    waiting_bytes: int = 0
    waiting: dict[bytes, Waiting] = field(default_factory=dict)
    dropped: Counter[Drop] = field(default_factory=Counter)
    is_closing: bool = False


@dataclass(slots=True, eq=False)
class Waiting:
    """One part on its way to the disk."""

    account: Account
    name: bytes
    data: bytes
    sight: Sight
    is_charged: bool = False


@dataclass(slots=True)
class Run:
    """What was written without a rest: an event tells it."""

    began_at: float
    ended_at: float
    began_unix_nanoseconds: int
    account: Account
    parts: int = 0
    size_bytes: int = 0
    dropped: int = 0


class Writer:
    """``write`` puts a part on disk and says why not, if not; it is called on this thread alone."""

    def __init__(self, write: Callable[[Waiting], Drop | None], bytes_per_second: int) -> None:
        self._write = write
        self._bytes_per_second = bytes_per_second
        self._changed = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._all_bytes = 0
        self._uncharged = Hour()
        self._ready_at = 0.0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ssd tier writer", daemon=True)
        self._thread.start()

    def offer(self, account: Account, name: bytes, data: memoryview, sight: Sight) -> bool:
        """Take a copy of a part, if there is room for it."""
        size = len(data)
        with self._changed:
            if account.is_closing or self._is_closed:
                return self._refuse(account, "closed")
            if name in account.waiting:
                return True
            if account.waiting_bytes + size > account.queue_bytes:
                return self._refuse(account, "pressure")
            if not account.reserve(account.waiting_bytes + size):
                return self._refuse(account, "memory")
            waiting = Waiting(account, name, b"", sight)
            account.waiting[name] = waiting
            account.waiting_bytes += size
            self._all_bytes += size
            self._uncharge(waiting, file_bytes(size))
        waiting.data = bytes(data)  # a slow copy that nobody else has to wait for
        with self._changed:
            self._queue.append(waiting)
            self._changed.notify_all()
        return True

    def refuse(self, account: Account, drop: Drop) -> bool:
        """Count what never waited; always False."""
        with self._changed:
            return self._refuse(account, drop)

    def find(self, account: Account, name: bytes) -> bytes | None:
        """What waits under this name."""
        with self._changed:
            waiting = account.waiting.get(name)
            return None if waiting is None or not waiting.data else waiting.data

    def forget(self, account: Account, name: bytes) -> None:
        """A part that waits is not wanted any more."""
        with self._changed:
            waiting = account.waiting.get(name)
            if waiting is not None and waiting in self._queue:
                self._queue.remove(waiting)
                self._done(waiting)

    def uncharged(self) -> Hour:
        """File bytes that wait, of all tiers, and are not charged to the day's bytes yet."""
        with self._changed:
            return Hour(self._uncharged.written_bytes, self._uncharged.first_bytes)

    def charged(self, waiting: Waiting) -> None:
        """A part's bytes are charged."""
        with self._changed:
            self._charge(waiting)

    def settle(self, seconds: float) -> bool:
        """Wait until nothing waits any more; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._all_bytes == 0, seconds)

    def leave(self, account: Account) -> None:
        """Write what this tier has waiting, at full speed and for a limited time; drop the rest."""
        with self._changed:
            account.is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not account.waiting, FLUSH_SECONDS)
            for waiting in [each for each in self._queue if each.account is account]:
                self._queue.remove(waiting)
                self._refuse(account, "closed")
                self._done(waiting)
            self._changed.wait_for(lambda: not account.waiting, FLUSH_SECONDS)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(FLUSH_SECONDS)

    # --- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        run: Run | None = None
        while True:
            with self._changed:
                if run is not None and not self._queue:
                    finished, run = run, None
                else:
                    finished = None
                    self._changed.wait_for(lambda: self._queue or self._is_closed)
                    if self._is_closed:
                        return
            if finished is not None:
                finished.account.on_rest(finished)
                continue
            with self._changed:
                self._changed.wait_for(self._may_go, max(0.0, self._ready_at - time.monotonic()))
                if not self._queue:
                    continue
                waiting = self._queue.popleft()
            run = run or Run(time.monotonic(), 0.0, time.time_ns(), waiting.account)
            size, began = len(waiting.data), time.monotonic()
            drop = self._attempt(waiting)
            run.account, run.ended_at = waiting.account, time.monotonic()
            with self._changed:
                if drop is None:
                    run.parts += 1
                    run.size_bytes += size
                    self._ready_at = max(self._ready_at, began) + size / self._bytes_per_second
                else:
                    run.dropped += 1
                    self._refuse(waiting.account, drop)
                self._done(waiting)
                del waiting  # and with it the part's bytes, however long the next one takes to come

    def _attempt(self, waiting: Waiting) -> Drop | None:
        try:
            return self._write(waiting)
        except Exception:  # the thread must outlive a fault, or nothing would be written any more
            log.exception("a part could not be written")
            return "error"

    def _may_go(self) -> bool:
        return (
            self._is_closed
            or time.monotonic() >= self._ready_at
            or any(each.account.is_closing for each in self._queue)
        )

    # --- under the lock -------------------------------------------------------------------

    def _charge(self, waiting: Waiting) -> None:
        if not waiting.is_charged:
            waiting.is_charged = True
            self._uncharge(waiting, -file_bytes(len(waiting.data)))

    def _uncharge(self, waiting: Waiting, size: int) -> None:
        self._uncharged.written_bytes += size
        self._uncharged.first_bytes += size if waiting.sight == "first" else 0

    def _done(self, waiting: Waiting) -> None:
        account, size = waiting.account, len(waiting.data)
        self._charge(waiting)
        del account.waiting[waiting.name]
        account.waiting_bytes -= size
        self._all_bytes -= size
        account.reserve(account.waiting_bytes)
        self._changed.notify_all()

    def _refuse(self, account: Account, drop: Drop) -> bool:
        account.dropped[drop] += 1
        return False
