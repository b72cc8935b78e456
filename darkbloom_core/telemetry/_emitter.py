"""Hands each event to every sink. A sink that raises is counted, logged once by name, and stops nothing."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from darkbloom_core.contracts import Event, SinkFailed, TelemetrySink

logger = logging.getLogger("darkbloom.telemetry")


class SinkEmitter:
    """A ``contracts.Emitter`` over ``sinks``. Any thread may emit; nothing here raises."""

    def __init__(self, sinks: Sequence[TelemetrySink] = ()) -> None:
        self._sinks = tuple((_name(sink), sink) for sink in sinks)
        self._failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def sinks(self) -> tuple[TelemetrySink, ...]:
        """The sinks, in order."""
        return tuple(sink for _, sink in self._sinks)

    @property
    def failures(self) -> Mapping[str, int]:
        """How often each sink raised so far; 0 for a sound one."""
        with self._lock:
            return {name: self._failures[name] for name, _ in self._sinks}

    def emit(self, event: Event) -> None:
        """Give ``event`` to every sink. After ``close`` it goes nowhere."""
        if self._closed:
            return
        for name, sink in self._sinks:
            if not self._succeeds(name, partial(sink.emit, event)):
                self._tell_others(name)

    def close(self) -> None:
        """Close every sink, once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for name, sink in self._sinks:
            self._succeeds(name, sink.close)

    def _tell_others(self, failed: str) -> None:
        event = SinkFailed(sink=failed)
        for name, sink in self._sinks:
            if name != failed:  # a sink that cannot take this one either is counted, but told about to nobody
                self._succeeds(name, partial(sink.emit, event))

    def _succeeds(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except (Exception, SystemExit) as error:  # a sink may raise anything
            with self._lock:
                self._failures[name] += 1
                first = self._failures[name] == 1
            if first:
                logger.error("telemetry sink %s raised; it is counted from now on", name, exc_info=error)
            return False
        return True


def _name(sink: TelemetrySink) -> str:
    try:
        return str(sink.name)
    except Exception:  # a sink may raise anything
        return type(sink).__name__
