"""What a server and its engines hold when nothing runs, and waiting until they hold that again."""

from __future__ import annotations

import time

from darkbloom_core.server import GenerationService


class AtRest:
    """Made when every model is loaded and nothing was asked yet."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._at_rest = self._held()

    def wait(self, seconds: float) -> None:
        """Until no request runs, waits or holds more than there was at rest; fails after ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._held() != self._at_rest:
            assert time.monotonic() < deadline, (self._held(), self._at_rest)
            time.sleep(0.005)

    def _held(self) -> list[tuple[int, ...]]:
        slots = self._service.slots
        media = sum(one.kind == "media" for one in slots.memory.ledger.reservations().values())
        statuses = [slot.engine.status() for slot in slots.slots()]
        return [
            (self._service.running, media),
            *((status.running, status.waiting, status.kv_bytes_reserved) for status in statuses),
        ]
