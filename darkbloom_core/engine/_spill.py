"""Hands parts to the tiers below RAM on a thread of its own, so that no step waits for their copies.

Always true: at most ``MOST_BYTES`` of parts wait, or one; what comes when there are more is
dropped. Parts that RAM holds wait by name only, and are dropped if RAM has lost them by then.
A part whose bytes cannot be had is dropped alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import mlx.core as mx

from darkbloom_core.contracts import PartKey
from darkbloom_core.engine._host import bytes_of

log = logging.getLogger(__name__)

MOST_BYTES = 64 * 1024**2
CLOSE_SECONDS = 5.0
"""How long a tier that hangs in a copy is waited for in the end."""


class Spill:
    """``offer_below`` takes a part's key and what gives its bytes; it is called on this thread.

    ``held`` gives the array of a part that RAM holds, or None.
    """

    def __init__(
        self,
        offer_below: Callable[[PartKey, Callable[[], memoryview]], None],
        held: Callable[[PartKey], mx.array | None],
    ) -> None:
        self._offer_below = offer_below
        self._held = held
        self._changed = threading.Condition()
        self._waiting: deque[tuple[PartKey, mx.array | None]] = deque()
        self._waiting_bytes = 0
        self._is_closed = False
        self.dropped = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="prefix cache", daemon=True)
        self._thread.start()

    def offer(self, key: PartKey, array: mx.array) -> None:
        """Take a part, whose ``array`` is evaluated. Returns at once."""
        with self._changed:
            if self._waiting and self._waiting_bytes + array.nbytes > MOST_BYTES:
                self.dropped += 1
                return
            self._waiting.append((key, array))
            self._waiting_bytes += array.nbytes
            self._changed.notify_all()

    def offer_held(self, keys: Iterable[PartKey]) -> None:
        """Take parts that RAM holds. Returns at once."""
        with self._changed:
            self._waiting.extend((key, None) for key in keys)
            self._changed.notify_all()

    def wait(self) -> None:
        """Until everything that was offered is handed over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._is_closed)

    def close(self) -> None:
        """End the thread; what still waits is dropped. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _give(self, key: PartKey, array: mx.array) -> None:
        try:
            self._offer_below(key, partial(bytes_of, array))
        except Exception as fault:  # no memory for the copy, say: the part is lost, the thread is not
            with self._changed:
                self.dropped += 1
            if not self._has_failed:
                self._has_failed = True
                log.warning(
                    "a part of the prefix cache is not offered to the tiers, nor will others that fail be told of: %s",
                    fault,
                )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    self._waiting.clear()
                    return
                key, waiting = self._waiting[0]
            array = self._held(key) if waiting is None else waiting
            if array is not None:
                self._give(key, array)
            del array
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= 0 if waiting is None else waiting.nbytes
                waiting = None
                self._changed.notify_all()
