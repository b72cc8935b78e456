"""Holds the slots: loads models, on demand too, shares KV memory among them, recovers them and lets them go.

Always true: one model loads at a time, and whoever wants a model that loads waits for that
load; nothing is evicted that somebody uses; liveness is watched only of slots that serve.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import read_config
from darkbloom_core.contracts import (
    CacheTierFactory,
    Emitter,
    ModelFamily,
    Progress,
)
from darkbloom_core.errors import (
    CheckpointError,
    Draining,
    ModelNotFound,
    ModelNotReady,
)
from darkbloom_core.memory import MachineReadings, Readings
from darkbloom_core.settings import Settings
from darkbloom_core.slots import _recovery
from darkbloom_core.slots._capacity import SlotCapacity, slot_capacity
from darkbloom_core.slots._device import current_device
from darkbloom_core.slots._engines import Engines
from darkbloom_core.slots._keeper import Job, Keeper
from darkbloom_core.slots._loading import KnownModel, Loading
from darkbloom_core.slots._memory import SlotMemory
from darkbloom_core.slots._prefix import PrefixSetup
from darkbloom_core.slots._recovery import Recovery
from darkbloom_core.slots._samples import engine_samples
from darkbloom_core.slots._slot import Slot
from darkbloom_core.slots._table import SlotTable

FamilyFor = Callable[[Mapping[str, Any]], ModelFamily]

IDLE_POLL_SECONDS = 60.0


class SlotManager:
    """Thread-safe. ``family_for`` finds the installed family that reads a config.

    ``cache_tiers`` are those that plugins offer; the settings say which are used. Raises
    ``SettingsError`` if they name another.

    Locks are taken in this order: the load gate, the share gate, the table's lock.
    """

    def __init__(
        self,
        settings: Settings,
        family_for: FamilyFor,
        emitter: Emitter,
        readings: Readings | None = None,
        cache_tiers: Sequence[CacheTierFactory] = (),
    ) -> None:
        self._prefix = PrefixSetup(
            settings, cache_tiers, emitter, lambda key, size: self.memory.ledger.hold(key, size, "host")
        )
        self._settings = settings
        self._family_for = family_for
        self._emitter = emitter
        self._table = SlotTable(emitter)
        self._known: dict[str, KnownModel] = {}
        self._futures: dict[str, Future[Slot]] = {}
        self._load_gate = threading.Lock()
        self._share_gate = threading.Lock()
        self._draining = False
        self.memory = SlotMemory(
            settings.memory,
            readings or MachineReadings(),
            lambda: self._table.slots.values(),
            self._wake_engines,
            emitter,
        )
        engines = Engines(settings, self.memory)
        self._engines = engines
        self._loading = Loading(
            self._table,
            self.memory,
            engines,
            self._prefix,
            self._share_gate,
            self._evict,
            settings.slots.max_models,
        )
        self._recovery = Recovery(self._table, self.memory, engines, self._share_gate, self.unload)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="model loader")
        idle = settings.slots.idle_seconds
        self._keeper = Keeper(
            "slots",
            Job(self._sample_engines, settings.telemetry.sample_seconds),
            Job(self.unload_idle, min(IDLE_POLL_SECONDS, idle / 4)),
            Job(self.recover_wedged, _recovery.WEDGE_POLL_SECONDS),
        )

    # --- what requests need -------------------------------------------------------

    def slots(self) -> tuple[Slot, ...]:
        """Every slot, by name."""
        return self._table.in_order()

    def capacity(self) -> tuple[SlotCapacity, ...]:
        """What each slot can take now, by name."""
        slots = self.slots()
        granted = sum(slot.grant_bytes for slot in slots)
        return tuple(slot_capacity(slot, self.memory, granted - slot.grant_bytes) for slot in slots)

    def known(self) -> tuple[KnownModel, ...]:
        """What may be asked for, in memory or not, by name."""
        return tuple(model for _, model in sorted(dict(self._known).items()))

    def known_model(self, name: str) -> KnownModel:
        """What may be asked for as ``name``. Raises ``ModelNotFound``."""
        model = self._known.get(name)
        if model is None:
            raise self._not_found(name)
        return model

    def get(self, name: str) -> Slot:
        """The slot that serves ``name`` now.

        Raises ``ModelNotFound``, or ``ModelNotReady`` or ``Draining`` where a retry may help.
        """
        slot = self._table.slots.get(name)
        if slot is None and name not in self._known:
            raise self._not_found(name)
        if self._draining:
            raise Draining("the server is shutting down")
        if slot is None or slot.state != "serving":
            raise ModelNotReady(f"{name} is {'absent' if slot is None else slot.state}")
        return slot

    def try_acquire(self, name: str) -> Slot | None:
        """``get``, and pin the slot so that it is not evicted before ``release``; None if it must be loaded first.

        Look-up and pin are one step. Never blocks for long. Raises ``ModelNotFound``,
        ``Draining``, and ``ModelNotReady`` for a slot that is recovered.
        """
        with self._table.lock:
            slot = self._table.slots.get(name)
            if slot is None and name not in self._known:
                raise self._not_found(name)
            if self._draining:
                raise Draining("the server is shutting down")
            if slot is not None and slot.state == "reloading":
                raise ModelNotReady(f"{name} is reloading", retry_after_seconds=5)
            if slot is None or slot.state != "serving":
                return None
            slot.pins += 1
            slot.used_at = time.monotonic()
            return slot

    def release(self, slot: Slot) -> None:
        """Undo one ``try_acquire`` or ``acquire``."""
        with self._table.lock:
            slot.pins -= 1
            slot.used_at = time.monotonic()

    def acquire(self, name: str) -> Slot:
        """Like ``try_acquire``, but waits for the model to be loaded.

        Raises too what loading raises: ``ModelDoesNotFit``, ``GrantTooSmall``,
        ``NoSlotFree``, or a ``CheckpointError``.
        """
        while (slot := self.try_acquire(name)) is None:
            self.load_known(name).result()
        return slot

    def load_known(self, name: str) -> Future[Slot]:
        """Have a known model loaded, evicting idle ones if need be; all who ask meanwhile get the same future.

        It cannot be cancelled. A model that is in memory already is not loaded again.
        """
        future, is_mine = self._join(name)
        if is_mine:
            try:
                self._loader.submit(self._run_load, name, future, None, evict=True)
            except RuntimeError:  # closed
                self._leave(name, future, error=Draining("the server is shutting down"))
        return future

    # --- loading and letting go -----------------------------------------------------

    def add(self, name: str, path: Path) -> KnownModel:
        """Let the checkpoint at ``path`` be asked for as ``name``; it is loaded when somebody does.

        Reads its config alone. Raises ``CheckpointError`` for a config that no family reads,
        or a name that another checkpoint has.
        """
        config = read_config(path)
        family = self._family_for(config)
        model = KnownModel(
            name=name,
            path=path,
            description=family.describe(config, current_device()),
            family=family,
            created_unix_seconds=int(time.time()),
        )
        with self._table.lock:
            known = self._known.setdefault(name, model)
        if known.path != path:
            raise CheckpointError(f"a model is already served as {name!r}")
        return known

    def load(self, name: str, path: Path, progress: Progress | None = None) -> Slot:
        """Load the checkpoint at ``path`` and serve it as ``name``; returns when it is warm. Evicts nothing.

        Raises ``CheckpointError`` for a fault of the checkpoint or a taken name, and
        ``ModelDoesNotFit``, ``GrantTooSmall`` or ``NoSlotFree`` if there is no room.
        Interrupted (Ctrl-C), the load ends at its next report of progress.
        """
        if name in self._table.slots:
            raise CheckpointError(f"a model is already served as {name!r}")
        is_new = name not in self._known
        self.add(name, path)
        future, is_mine = self._join(name)
        if is_mine:
            self._run_load(name, future, progress, evict=False)
        try:
            return future.result()
        except BaseException:
            if is_new:
                with self._table.lock:
                    self._known.pop(name, None)
            raise

    def unload(self, name: str) -> None:
        """End the slot's requests, free its memory, and give its share to the others; no-op if absent.

        A model that is being loaded is loaded first.
        """
        loading = self._futures.get(name)
        if loading is not None:
            loading.exception()
        slot = self._table.slots.get(name)
        if slot is not None and self._table.change(slot, "unloading", lambda: self._is_there(slot)):
            self._take_down(slot)

    def _is_there(self, slot: Slot) -> bool:
        """Whether nobody unloads or has unloaded the slot."""
        return self._table.slots.get(slot.name) is slot and slot.state != "unloading"

    def unload_idle(self) -> None:
        """Unload what nobody has used for ``slots.idle_seconds``."""
        longest = self._settings.slots.idle_seconds
        while self._evict(lambda slot: time.monotonic() - slot.used_at >= longest):
            pass

    def drain(self) -> None:
        """Take no new requests; those that run go on."""
        self._draining = True
        for slot in self.slots():
            slot.engine.drain()

    def close(self) -> None:
        """Unload everything; a load that is under way is undone. Idempotent."""
        self.drain()
        self._loading.close()
        self._keeper.close()
        self._loader.shutdown(wait=True, cancel_futures=False)
        with self._load_gate:
            for slot in self.slots():
                self.unload(slot.name)
        self.memory.close()

    # --- one load -----------------------------------------------------------------------

    def _join(self, name: str) -> tuple[Future[Slot], bool]:
        """The future of the load of ``name``, and whether the caller is the one to carry it out."""
        with self._table.lock:
            future = self._futures.get(name)
            if future is not None:
                return future, False
            future = self._futures[name] = Future()
            future.set_running_or_notify_cancel()
            return future, True

    def _leave(
        self, name: str, future: Future[Slot], slot: Slot | None = None, error: BaseException | None = None
    ) -> None:
        with self._table.lock:
            del self._futures[name]
        if slot is not None:
            future.set_result(slot)
        else:
            future.set_exception(error)

    def _run_load(self, name: str, future: Future[Slot], progress: Progress | None, *, evict: bool) -> None:
        try:
            with self._load_gate:
                slot = self._table.slots.get(name)
                if slot is None or slot.state != "serving":
                    slot = self._loading.load(self._known[name], progress, evict=evict)
        except BaseException as error:
            self._leave(name, future, error=error)
        else:
            self._leave(name, future, slot=slot)

    # --- eviction ---------------------------------------------------------------------------

    def _evict(self, wanted: Callable[[Slot], bool] = lambda _: True) -> bool:
        """Unload the ``wanted`` slot that is idle for longest; False if there is none."""
        slot = self._table.retire_idle(wanted)
        if slot is not None:
            self._take_down(slot)
        return slot is not None

    def _take_down(self, slot: Slot) -> None:
        """Free a slot that is marked as unloading; its weights are gone before anybody grows."""
        hangs = slot.engine.status().wedge != "none"
        self._engines.end(slot.engine, slot.weight_bytes, hangs=hangs)
        self.memory.clear_cache()
        self._table.remove(slot)
        self._table.change(slot, "absent")
        with self._share_gate:
            self.memory.share_out(check=False)

    def recover_wedged(self) -> None:
        """Rebuild engines that make no progress any more, and unload those that died or wedge again at once."""
        self._recovery.look()

    # --- telling --------------------------------------------------------------------------

    def _not_found(self, name: str) -> ModelNotFound:
        served = ", ".join(model.name for model in self.known()) or "none"
        return ModelNotFound(f"no model {name!r} is served here (served: {served})", param="model")

    def _wake_engines(self) -> None:
        for slot in self.slots():
            slot.engine.wake()

    def _sample_engines(self) -> None:
        for slot in self.slots():
            for event in engine_samples(slot.name, slot.activity, slot.engine.status()):
                self._emitter.emit(event)
