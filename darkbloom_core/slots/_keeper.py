"""A thread that does small jobs again and again until it is closed; a job that raises is logged and done again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """``run`` every ``seconds``; 0 seconds means never."""

    run: Callable[[], None]
    seconds: float


class Keeper:
    """Runs ``jobs`` from now on."""

    def __init__(self, name: str, *jobs: Job) -> None:
        self._jobs = [job for job in jobs if job.seconds > 0]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        if self._jobs:
            self._thread.start()

    def close(self) -> None:
        """End the thread; a job that runs comes to its end first, unless it is the one that closes. Idempotent."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        due = [time.monotonic() + job.seconds for job in self._jobs]
        while not self._closed.wait(max(0.0, min(due) - time.monotonic())):
            for index, job in enumerate(self._jobs):
                if time.monotonic() < due[index] or self._closed.is_set():
                    continue
                try:
                    job.run()
                except Exception:
                    log.exception("a job of the slots failed")
                due[index] = time.monotonic() + job.seconds
