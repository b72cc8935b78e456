"""One load, step by step, and how it is undone.

Always true: whatever fails, the weights are gone first, then the claim, then the others
get their shares back; a load that failed leaves no slot behind and the others' grants as
they were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from darkbloom_core.contracts import LoadedModel, ModelDescription, ModelFamily, Placement, Progress
from darkbloom_core.errors import CheckpointError, Draining, NoSlotFree
from darkbloom_core.slots._defaults import sampling_defaults
from darkbloom_core.slots._device import current_device
from darkbloom_core.slots._engines import Engines
from darkbloom_core.slots._memory import SlotMemory
from darkbloom_core.slots._prefix import PrefixSetup
from darkbloom_core.slots._slot import Slot
from darkbloom_core.slots._table import SlotTable
from darkbloom_core.slots._weights import estimated_weight_bytes, weights_version


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that may be asked for, in memory or not."""

    name: str
    path: Path
    description: ModelDescription
    family: ModelFamily
    created_unix_seconds: int


class Loading:
    """Carries out loads, one at a time: whoever calls ``load`` holds the load gate.

    ``evict`` unloads the slot that is idle for longest; False if there is none. ``most_slots``
    bounds how many there are. ``share_gate`` is held while shares are divided.
    """

    def __init__(
        self,
        table: SlotTable,
        memory: SlotMemory,
        engines: Engines,
        prefix: PrefixSetup,
        share_gate: threading.Lock,
        evict: Callable[[], bool],
        most_slots: int,
    ) -> None:
        self._table = table
        self._memory = memory
        self._engines = engines
        self._prefix = prefix
        self._share_gate = share_gate
        self._evict = evict
        self._most_slots = most_slots
        self._closing = False
        self._abandoned = threading.Event()  # of the one load that is under way

    def close(self) -> None:
        """A load that is under way is undone, and none begins any more."""
        self._closing = True
        self._abandoned.set()

    def load(self, model: KnownModel, progress: Progress | None, *, evict: bool) -> Slot:
        """Load ``model``, with ``evict`` in place of idle models; returns when it is warm."""
        self._check_open()
        began, self._abandoned = time.monotonic(), threading.Event()
        slot = self._open(model, _until(self._abandoned, progress))
        try:
            self._make_place(slot.name, evict=evict)
            self._make_room(slot, evict=evict)
        except BaseException as fault:
            slot.engine.close()
            self._table.tell_failure(slot, 0.0, fault)
            raise
        self._table.add(slot)
        self._table.tell(slot, "loading", 0.0)
        try:
            prefix = self._prefix.begin(model)
            self._load_weights(slot)
            slot.prefix = prefix()
            self._warm(slot)
            self._check_open()
        except BaseException as fault:  # Ctrl-C too, which leaves the engine's thread loading
            self._undo(slot, fault)
            raise
        slot.load_seconds = time.monotonic() - began
        self._table.change(slot, "serving")
        return slot

    def _load_weights(self, slot: Slot) -> None:
        version = weights_version(slot.path)
        slot.weight_bytes = slot.engine.load_model()
        if weights_version(slot.path) != version:
            raise CheckpointError(f"{slot.path}: the weights changed while they were loaded; load them again")
        self._check_open()
        self._memory.release(slot.name)
        self._memory.clear_cache()
        self._memory.check_serves(slot)

    def _warm(self, slot: Slot) -> None:
        with self._share_gate:
            self._memory.share_out(check=True)
        self._table.change(slot, "warming")
        slot.engine.start(slot.grant_bytes, self._memory.budget(), slot.prefix)
        choices = slot.engine.status().choices
        with self._share_gate:
            slot.activation_bytes = choices.activation_bytes if choices is not None else 0
            slot.engine.resize(slot.grant_bytes)  # it may have changed while the engine was built
            self._memory.share_out(check=True)
        self._memory.clear_cache()
        self._memory.check_serves(slot)

    def _undo(self, slot: Slot, fault: BaseException) -> None:
        """Weights first, then the claim, then the others' shares: nobody grows into memory that is not free."""
        seconds = time.monotonic() - slot.state_since
        self._abandoned.set()
        slot.engine.close()
        self._memory.clear_cache()
        self._memory.release(slot.name)
        self._table.remove(slot)
        with self._share_gate:
            self._memory.share_out(check=False)
        self._table.tell_failure(slot, seconds, fault)

    def _open(self, model: KnownModel, progress: Progress) -> Slot:
        codec = model.family.codec(model.path, model.description)

        def load() -> LoadedModel:
            return model.family.load(model.path, model.description, Placement(current_device()), progress)

        return Slot(
            name=model.name,
            path=model.path,
            description=model.description,
            codec=codec,
            defaults=sampling_defaults(model.path),
            engine=self._engines.new(model.name, codec, load),
            created_unix_seconds=model.created_unix_seconds,
        )

    def _make_place(self, name: str, *, evict: bool) -> None:
        """A free slot, by evicting the one that is idle for longest if need be."""
        most = self._most_slots
        while len(self._table.slots) >= most:
            if not (evict and self._evict()):
                raise NoSlotFree(f"{most} models are loaded, and {name} would be one more; all are in use")

    def _make_room(self, slot: Slot, *, evict: bool) -> None:
        """Claim the weights' memory, by evicting idle models if need be."""
        weights = estimated_weight_bytes(slot.path, slot.description)
        while not self._memory.claim(slot.name, weights):
            if evict and self._evict():
                continue
            self._memory.clear_cache()
            if self._memory.claim(slot.name, weights):
                return
            raise self._memory.refusal(slot.name, weights)

    def _check_open(self) -> None:
        if self._closing:
            raise Draining("the server is shutting down")


def _until(abandoned: threading.Event, progress: Progress | None) -> Progress:
    """``progress``, but once ``abandoned`` is set a load ends at its next report instead of running to its end."""

    def report(done_bytes: int, total_bytes: int) -> None:
        if abandoned.is_set():
            raise CheckpointError("the load was abandoned")
        if progress is not None:
            progress(done_bytes, total_bytes)

    return report
