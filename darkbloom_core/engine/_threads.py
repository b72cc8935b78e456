"""The threads that engines run on, one engine after the other.

On CUDA MLX gives each thread that multiplies matrices handles of cuBLAS and cuDNN of its own, and
destroys them when the thread ends. That waits for the whole device, which is not allowed while
another thread captures kernels for a graph: the capture fails, MLX throws where nobody can
catch it, and the process ends. So a thread whose engine has ended rests until the next one comes.

Always true: a thread has one engine at a time, there are no more threads than there ever were
engines at once, but for those that hang, and one at rest refers to nothing of its last engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)

AT_REST = "engine at rest"

_lock = threading.Lock()
_resting: list[_Worker] = []


class EngineThread:
    """Calls ``target`` once on a thread of that ``name``: what an engine needs of ``threading.Thread``."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._target: Callable[[], None] | None = target
        self._name = name
        self._ended = threading.Event()

    def start(self) -> None:
        """Once."""
        target = self._target
        if target is None:
            raise RuntimeError("an engine's thread starts once")
        with _lock:
            worker = _resting.pop() if _resting else _Worker()
        self._target = None
        worker.run(target, self._name, self._ended)

    def is_alive(self) -> bool:
        """Whether ``target`` has been called and has not returned."""
        return self._target is None and not self._ended.is_set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until ``target`` has returned, but no longer than ``seconds``."""
        self._ended.wait(seconds)


class _Worker:
    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], None], str, threading.Event]] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=AT_REST, daemon=True)
        self._thread.start()

    def run(self, target: Callable[[], None], name: str, ended: threading.Event) -> None:
        self._work.put((target, name, ended))

    def _serve(self) -> None:
        while True:
            target, self._thread.name, ended = self._work.get()
            try:
                target()
            except BaseException:  # an engine keeps its own faults, so this is one of ours
                log.exception("an engine's thread raised")
            del target
            self._thread.name = AT_REST
            with _lock:
                _resting.append(self)
            ended.set()
            del ended
