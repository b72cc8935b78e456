"""Reading: several files at once, each decrypted straight into the buffer that it was asked for.

Always true: once an answer is there nothing is written to its buffers any more; an answer
that nobody wants stops at the next segment.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from darkbloom_core.contracts import Fetch


class Answer(Future[Sequence[bool]]):
    """What ``CacheTier.fetch`` gives. Cancelling it also stops what has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.is_unwanted = False

    def cancel(self) -> bool:
        self.is_unwanted = True
        return super().cancel()


@dataclass(frozen=True, slots=True)
class Reading:
    """How one fetch went, for measurements and events."""

    parts: int
    parts_missing: int
    size_bytes: int
    seconds: float
    began_unix_nanoseconds: int


ReadOne = Callable[[Fetch, Callable[[], bool]], bool]
"""Fill the buffer; the second argument says whether to stop. Never raises."""


class Readers:
    """``count`` threads for all tiers of a cache."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="ssd tier reader")
        self._is_closed = False

    def fetch(self, fetches: Sequence[Fetch], read: ReadOne, on_read: Callable[[Reading], None]) -> Answer:
        """Read all; ``on_read`` is called before the answer is there, unless it was cancelled."""
        answer = Answer()
        if not fetches:
            answer.set_running_or_notify_cancel()
            answer.set_result(())
            return answer
        work = _Work(fetches, read, on_read, answer, lambda: self._is_closed)
        for place in range(len(fetches)):
            try:
                self._pool.submit(work.run, place)
            except RuntimeError:  # closed meanwhile
                work.run(place)
        return answer

    def submit(self, call: Callable[[], None]) -> None:
        """Let a thread do this as well, unless they have ended."""
        with contextlib.suppress(RuntimeError):
            self._pool.submit(call)

    def close(self) -> None:
        """Answer what was asked, with nothing where it has not been read yet, and end the threads."""
        self._is_closed = True
        self._pool.shutdown()


class _Work:
    def __init__(
        self,
        fetches: Sequence[Fetch],
        read: ReadOne,
        on_read: Callable[[Reading], None],
        answer: Answer,
        is_closed: Callable[[], bool],
    ) -> None:
        self._fetches = tuple(fetches)
        self._read = read
        self._on_read = on_read
        self._answer = answer
        self._is_closed = is_closed
        self._lock = threading.Lock()
        self._found = [False] * len(self._fetches)
        self._left = len(self._fetches)
        self._is_running: bool | None = None
        self._began, self._began_unix = time.monotonic(), time.time_ns()

    def run(self, place: int) -> None:
        with self._lock:
            if self._is_running is None:
                self._is_running = self._answer.set_running_or_notify_cancel()
            is_wanted = self._is_running
        if is_wanted and not self._is_stopped():
            self._found[place] = self._read(self._fetches[place], self._is_stopped)
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last and is_wanted:
            sizes = [len(one.buffer) for one, came in zip(self._fetches, self._found, strict=True) if came]
            self._on_read(
                Reading(
                    parts=len(self._fetches),
                    parts_missing=len(self._fetches) - len(sizes),
                    size_bytes=sum(sizes),
                    seconds=time.monotonic() - self._began,
                    began_unix_nanoseconds=self._began_unix,
                )
            )
            self._answer.set_result(tuple(self._found))

    def _is_stopped(self) -> bool:
        return self._answer.is_unwanted or self._is_closed()
