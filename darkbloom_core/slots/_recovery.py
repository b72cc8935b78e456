"""What becomes of slots whose engines hang or died: rebuilt over the same weights, or unloaded.

Always true: a rebuilt engine has the grant of the one before, and the other slots see
nothing of it; a slot that wedges again at once is unloaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from darkbloom_core.errors import Draining
from darkbloom_core.slots._engines import Engines
from darkbloom_core.slots._memory import SlotMemory
from darkbloom_core.slots._slot import Slot
from darkbloom_core.slots._table import SlotTable

log = logging.getLogger(__name__)

WEDGE_POLL_SECONDS = 1.0
COOLDOWN_SECONDS = 120.0
"""A slot that wedges again within this time of its last recovery is unloaded instead."""


class Recovery:
    """``unload`` ends a slot for good, by its name. ``share_gate`` is held while grants are looked at."""

    def __init__(
        self,
        table: SlotTable,
        memory: SlotMemory,
        engines: Engines,
        share_gate: threading.Lock,
        unload: Callable[[str], None],
    ) -> None:
        self._table = table
        self._memory = memory
        self._engines = engines
        self._share_gate = share_gate
        self._unload = unload

    def look(self) -> None:
        """Rebuild the engines that make no progress any more; unload those that wedge again at once.

        One whose thread has ended with an error has no weights left: it is unloaded, and
        loaded again when somebody asks for it.
        """
        for slot in self._table.in_order():
            status = slot.engine.status()
            if slot.state != "serving":
                continue
            if status.failed:
                log.error("the engine of %s has failed: unloaded", slot.name)
                self._unload(slot.name)
            elif status.wedge == "confirmed":
                now = time.monotonic()
                if slot.recovered_at is not None and now - slot.recovered_at < COOLDOWN_SECONDS:
                    log.error("%s is wedged again: unloaded", slot.name)
                    self._unload(slot.name)
                else:
                    slot.recovered_at = now
                    self.rebuild(slot)

    def rebuild(self, slot: Slot) -> None:
        """A new engine over the same weights, with the same grant; the other slots see nothing of it."""
        if not self._table.change(slot, "reloading", lambda: slot.state == "serving"):
            return
        model = slot.engine.model
        self._engines.end(slot.engine, 0, hangs=True)
        self._memory.clear_cache()
        engine = self._engines.new(slot.name, slot.codec, lambda: model)
        try:
            engine.load_model()
            engine.start(slot.grant_bytes, self._memory.budget(), slot.prefix)
            with self._share_gate, self._table.lock:
                if not _is_reloading(slot):
                    raise Draining(f"{slot.name} was unloaded meanwhile")
                slot.engine = engine
                engine.resize(slot.grant_bytes)
            self._memory.clear_cache()
            self._memory.check_serves(slot)
        except Exception as fault:
            log.error("%s was not recovered: %s", slot.name, fault)
            engine.close()
            del model
            self._unload(slot.name)
        else:
            self._table.change(slot, "serving")


def _is_reloading(slot: Slot) -> bool:
    """Whether nobody has unloaded the slot since its recovery began."""
    return slot.state == "reloading"
