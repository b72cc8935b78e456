"""The table of slots: who is there, in which state, and telling it.

Always true: ``slots`` is replaced, never changed, so whoever only reads it needs no lock;
states change under ``lock``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from darkbloom_core.contracts import Emitter, SlotChanged, SlotState
from darkbloom_core.errors import DarkbloomError
from darkbloom_core.slots._slot import Slot

log = logging.getLogger(__name__)


class SlotTable:
    """Thread-safe. ``lock`` is for steps that look something up and change it at once."""

    def __init__(self, emitter: Emitter) -> None:
        self.lock = threading.Lock()
        self.slots: Mapping[str, Slot] = {}
        self._emitter = emitter

    def in_order(self) -> tuple[Slot, ...]:
        """Every slot, by name."""
        return tuple(slot for _, slot in sorted(self.slots.items()))

    def add(self, slot: Slot) -> None:
        with self.lock:
            self.slots = {**self.slots, slot.name: slot}

    def remove(self, slot: Slot) -> None:
        """No-op if it is not there."""
        with self.lock:
            self.slots = {name: each for name, each in self.slots.items() if each is not slot}

    def change(self, slot: Slot, state: SlotState, is_right: Callable[[], bool] = lambda: True) -> bool:
        """Put ``slot`` into ``state`` if ``is_right``, in one step; False if it is not."""
        with self.lock:
            if not is_right():
                return False
            seconds = self._enter(slot, state)
        self.tell(slot, state, seconds)
        return True

    def retire_idle(self, wanted: Callable[[Slot], bool]) -> Slot | None:
        """Mark the ``wanted`` slot that is idle for longest as unloading; None if there is none.

        Choice and mark are one step, so whoever comes later does not get the slot any more.
        """
        with self.lock:
            idle = [slot for slot in self.slots.values() if wanted(slot) and slot.is_idle]
            if not idle:
                return None
            slot = min(idle, key=lambda each: each.used_at)
            seconds = self._enter(slot, "unloading")
        self.tell(slot, "unloading", seconds)
        return slot

    def _enter(self, slot: Slot, state: SlotState) -> float:
        """Change the state; returns the seconds that the one before lasted."""
        now = time.monotonic()
        seconds, slot.state, slot.state_since = now - slot.state_since, state, now
        log.info("%s: %s", slot.name, state)
        return seconds

    # --- telling --------------------------------------------------------------------------

    def tell(self, slot: Slot, state: SlotState, seconds: float, error_code: str | None = None) -> None:
        """One event: ``slot`` is in ``state``, after ``seconds`` in the one before."""
        self._emitter.emit(
            SlotChanged(
                model=slot.name,
                family=slot.description.family,
                state=state,
                seconds=seconds,
                error_code=error_code,
            )
        )

    def tell_failure(self, slot: Slot, seconds: float, fault: BaseException) -> None:
        """One event, and a line in the log: the load of ``slot`` ended with ``fault``."""
        code = fault.code if isinstance(fault, DarkbloomError) else "internal_error"
        if not isinstance(fault, KeyboardInterrupt):
            log.error("%s was not loaded: %s", slot.name, fault)
        self.tell(slot, "failed", seconds, code)
