"""The bounded buffer between the engine's thread and whoever reads an output.

Always true: events arrive in order, the last one is an ``OutputEnd`` and there is exactly
one; nothing is dropped: when a reader is slow the engine pauses the row instead.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from darkbloom_core.engine._request import OutputEnd, OutputEvent


class OutputStream:
    """One output's events; iterate it (``async for`` or ``for``) exactly once.

    ``cancel`` may be called from any thread, at any time, any number of times.
    """

    def __init__(self, on_cancel: Callable[[], None], on_drained: Callable[[], None], limit: int) -> None:
        self._on_cancel = on_cancel
        self._on_drained = on_drained
        self._limit = limit
        self._events: deque[OutputEvent] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """The reader is behind by the limit: the row should pause."""
        return len(self._events) >= self._limit

    @property
    def is_drained(self) -> bool:
        """The reader has caught up to half the limit: the row may go on."""
        return len(self._events) <= self._limit // 2

    @property
    def ended(self) -> bool:
        """The terminal event was pushed."""
        return self._ended

    def cancel(self) -> None:
        """Ask the engine to stop; the stream still ends with its one terminal event."""
        self._on_cancel()

    def push(self, event: OutputEvent) -> None:
        """Called by the engine only."""
        with self._changed:
            if self._ended:
                raise RuntimeError("the stream has ended already")
            self._ended = isinstance(event, OutputEnd)
            self._events.append(event)
            self._changed.notify()
            loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the reader's loop is closed: nobody reads any more
                self.cancel()

    def __iter__(self) -> Iterator[OutputEvent]:
        while True:
            with self._changed:
                while not self._events:
                    self._changed.wait()
                event = self._pop()
            yield event
            if isinstance(event, OutputEnd):
                return

    async def __aiter__(self) -> AsyncIterator[OutputEvent]:
        with self._changed:
            self._loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                event = self._pop() if self._events else None
                waiter = None if event is not None else self._loop.create_future()
                self._waiter = waiter
            if event is None:
                assert waiter is not None
                await waiter
                continue
            yield event
            if isinstance(event, OutputEnd):
                return

    def _pop(self) -> OutputEvent:
        event = self._events.popleft()
        if len(self._events) == self._limit // 2:
            self._on_drained()
        return event

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
