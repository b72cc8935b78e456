"""What engines hold when nothing runs, and waiting until they hold that again."""

from __future__ import annotations

import time

from darkbloom_core.slots import SlotManager


class AtRest:
    """Made when every model is loaded and nothing was asked yet."""

    def __init__(self, slots: SlotManager) -> None:
        self._slots = slots
        self._at_rest = self._held()

    def wait(self, seconds: float) -> None:
        """Until nothing runs, waits or is reserved beyond what was at rest; fails after ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._held() != self._at_rest:
            assert time.monotonic() < deadline, (self._held(), self._at_rest)
            time.sleep(0.005)

    def _held(self) -> list[tuple[int, int, int]]:
        statuses = [slot.engine.status() for slot in self._slots.slots()]
        return [(status.running, status.waiting, status.kv_bytes_reserved) for status in statuses]
