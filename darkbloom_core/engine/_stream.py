"""The bounded buffer between the engine's thread and whoever reads an output.

Always true: events arrive in order, the last one is an ``OutputEnd`` and there is exactly
one; nothing is dropped: when a reader is slow the engine pauses the row instead. A stream
knows nothing of its request, so a reader that keeps it keeps nothing else.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from darkbloom_core.engine._request import OutputEnd, OutputEvent


class OutputStream:
    """One output's events; iterate it (``async for`` or ``for``) exactly once.

    ``cancel`` may be called from any thread, at any time, any number of times. ``wake`` tells
    the engine that it may have something to do: the reader cancelled, or has caught up.
    """

    def __init__(self, wake: Callable[[], None], limit: int) -> None:
        self._wake = wake
        self._limit = limit
        self._events: deque[OutputEvent] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._cancelled = False
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

    @property
    def cancelled(self) -> bool:
        """The reader wants no more."""
        return self._cancelled

    def cancel(self) -> None:
        """Ask the engine to stop; the stream still ends with its one terminal event."""
        self._cancelled = True
        self._wake()

    def push(self, event: OutputEvent) -> None:
        """Called by the engine only, which calls ``wake_readers`` afterwards."""
        with self._changed:
            if self._ended:
                raise RuntimeError("the stream has ended already")
            self._ended = isinstance(event, OutputEnd)
            self._events.append(event)
            self._changed.notify()

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
            self._wake()
        return event

    @property
    def reader_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which somebody reads, if one does."""
        return self._loop

    def wake_reader(self) -> None:
        """Called in the reader's event loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def wake_readers(streams: Iterable[OutputStream]) -> None:
    """Tell coroutines that read ``streams`` that there is something new: once per event loop, not once per stream."""
    read: defaultdict[asyncio.AbstractEventLoop, list[OutputStream]] = defaultdict(list)
    for stream in streams:
        if stream.reader_loop is not None:
            read[stream.reader_loop].append(stream)
    for loop, those in read.items():
        try:
            loop.call_soon_threadsafe(_wake_each, those)
        except RuntimeError:  # the readers' loop is closed: nobody reads any more
            for stream in those:
                stream.cancel()


def _wake_each(streams: list[OutputStream]) -> None:
    for stream in streams:
        stream.wake_reader()
