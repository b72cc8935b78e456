"""Holds the slots: loads models, on demand too, shares KV memory among them, recovers them and lets them go.

Always true: one model loads at a time, and whoever wants a model that loads waits for that
load; nothing is evicted that somebody uses; a failed load leaves no slot behind and the
others' grants as they were; liveness is watched only of slots that serve.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import read_config
from darkbloom_core.contracts import (
    CacheTierFactory,
    ChatCodec,
    Emitter,
    LoadedModel,
    ModelDescription,
    ModelFamily,
    Placement,
    Progress,
    SlotChanged,
    SlotState,
)
from darkbloom_core.engine import Engine, EngineOptions
from darkbloom_core.errors import (
    CheckpointError,
    DarkbloomError,
    Draining,
    ModelNotFound,
    ModelNotReady,
    NoSlotFree,
)
from darkbloom_core.memory import MachineReadings, Readings
from darkbloom_core.settings import EngineSettings, Settings
from darkbloom_core.slots._capacity import SlotCapacity, slot_capacity
from darkbloom_core.slots._defaults import sampling_defaults
from darkbloom_core.slots._device import current_device
from darkbloom_core.slots._keeper import Job, Keeper
from darkbloom_core.slots._memory import SlotMemory
from darkbloom_core.slots._prefix import PrefixSetup
from darkbloom_core.slots._samples import engine_samples
from darkbloom_core.slots._slot import Slot
from darkbloom_core.slots._weights import estimated_weight_bytes, weights_version

log = logging.getLogger(__name__)

FamilyFor = Callable[[Mapping[str, Any]], ModelFamily]

IDLE_POLL_SECONDS = 60.0
WEDGE_POLL_SECONDS = 1.0
COOLDOWN_SECONDS = 120.0
"""A slot that wedges again within this time of its last recovery is unloaded instead."""

STUCK_SECONDS = 5.0
"""How long a wedged engine's thread gets to end before it is left behind."""

UNLOAD_SECONDS = 60.0
"""How long any other engine's thread gets: twice what a healthy step may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that may be asked for, in memory or not."""

    name: str
    path: Path
    description: ModelDescription
    family: ModelFamily
    created_unix_seconds: int


def engine_options(settings: EngineSettings, picture_bytes: int = 0) -> EngineOptions:
    """The settings table ``engine`` in the engine's own words."""
    choice = {"auto": None, "always": True, "never": False}
    return EngineOptions(
        max_rows=settings.max_rows,
        waiting_limit=settings.waiting_limit,
        chunk_tokens=settings.chunk_tokens,
        slice_seconds=settings.slice_milliseconds / 1000,
        event_buffer=settings.event_buffer,
        progress_seconds=settings.progress_seconds,
        deterministic=settings.deterministic,
        compiled=choice[settings.compile],
        chained=choice[settings.chain],
        packed=choice[settings.pack],
        picture_bytes=picture_bytes,
    )


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
        self._known: dict[str, KnownModel] = {}
        self._slots: Mapping[str, Slot] = {}  # replaced, never changed: whoever reads it needs no lock
        self._loading: dict[str, Future[Slot]] = {}
        self._load_gate = threading.Lock()
        self._share_gate = threading.Lock()
        self._table = threading.Lock()
        self._draining = False
        self._closing = False
        self._abandoned = threading.Event()  # of the one load that is under way
        self.memory = SlotMemory(
            settings.memory,
            readings or MachineReadings(),
            lambda: self._slots.values(),
            self._wake_engines,
            emitter,
        )
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="model loader")
        idle = settings.slots.idle_seconds
        self._keeper = Keeper(
            "slots",
            Job(self._sample_engines, settings.telemetry.sample_seconds),
            Job(self.unload_idle, min(IDLE_POLL_SECONDS, idle / 4)),
            Job(self.recover_wedged, WEDGE_POLL_SECONDS),
        )

    # --- what requests need -------------------------------------------------------

    def slots(self) -> tuple[Slot, ...]:
        """Every slot, by name."""
        return tuple(slot for _, slot in sorted(self._slots.items()))

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
        slot = self._slots.get(name)
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
        with self._table:
            slot = self._slots.get(name)
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
        with self._table:
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
        with self._table:
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
        if name in self._slots:
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
                with self._table:
                    self._known.pop(name, None)
            raise

    def unload(self, name: str) -> None:
        """End the slot's requests, free its memory, and give its share to the others; no-op if absent.

        A model that is being loaded is loaded first.
        """
        loading = self._loading.get(name)
        if loading is not None:
            loading.exception()
        with self._table:
            slot = self._slots.get(name)
            if slot is None or slot.state == "unloading":
                return
            before = self._enter_state(slot, "unloading")
        self._emit(slot, "unloading", before)
        self._take_down(slot)

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
        self._closing = True
        self._abandoned.set()
        self._keeper.close()
        self._loader.shutdown(wait=True, cancel_futures=False)
        with self._load_gate:
            for slot in self.slots():
                self.unload(slot.name)
        self.memory.close()

    # --- one load -----------------------------------------------------------------------

    def _join(self, name: str) -> tuple[Future[Slot], bool]:
        """The future of the load of ``name``, and whether the caller is the one to carry it out."""
        with self._table:
            future = self._loading.get(name)
            if future is not None:
                return future, False
            future = self._loading[name] = Future()
            future.set_running_or_notify_cancel()
            return future, True

    def _leave(
        self, name: str, future: Future[Slot], slot: Slot | None = None, error: BaseException | None = None
    ) -> None:
        with self._table:
            del self._loading[name]
        if slot is not None:
            future.set_result(slot)
        else:
            future.set_exception(error)

    def _run_load(self, name: str, future: Future[Slot], progress: Progress | None, *, evict: bool) -> None:
        try:
            with self._load_gate:
                slot = self._slots.get(name)
                if slot is None or slot.state != "serving":
                    slot = self._load_alone(name, progress, evict=evict)
        except BaseException as error:
            self._leave(name, future, error=error)
        else:
            self._leave(name, future, slot=slot)

    def _load_alone(self, name: str, progress: Progress | None, *, evict: bool) -> Slot:
        self._check_open()
        began, self._abandoned = time.monotonic(), threading.Event()
        slot = self._open(self._known[name], _until(self._abandoned, progress))
        try:
            self._make_place(name, evict=evict)
            self._make_room(slot, evict=evict)
        except BaseException as fault:
            slot.engine.close()
            self._tell_failure(slot, 0.0, fault)
            raise
        with self._table:
            self._slots = {**self._slots, name: slot}
        self._emit(slot, "loading", 0.0)
        try:
            prefix = self._prefix.begin(self._known[name])
            self._load_weights(slot)
            slot.prefix = prefix()
            self._warm(slot)
            self._check_open()
        except BaseException as fault:  # Ctrl-C too, which leaves the engine's thread loading
            self._undo(slot, fault)
            raise
        slot.load_seconds = time.monotonic() - began
        self._set_state(slot, "serving")
        return slot

    def _load_weights(self, slot: Slot) -> None:
        version = weights_version(slot.path)
        slot.weight_bytes = slot.engine.load_model()
        if weights_version(slot.path) != version:
            raise CheckpointError(f"{slot.path}: the weights changed while they were loaded; load them again")
        self._check_open()
        self.memory.release(slot.name)
        self.memory.clear_cache()
        self.memory.check_serves(slot)

    def _warm(self, slot: Slot) -> None:
        with self._share_gate:
            self.memory.share_out(check=True)
        self._set_state(slot, "warming")
        slot.engine.start(slot.grant_bytes, self.memory.budget(), slot.prefix)
        choices = slot.engine.status().choices
        with self._share_gate:
            slot.activation_bytes = choices.activation_bytes if choices is not None else 0
            slot.engine.resize(slot.grant_bytes)  # it may have changed while the engine was built
            self.memory.share_out(check=True)
        self.memory.clear_cache()
        self.memory.check_serves(slot)

    def _undo(self, slot: Slot, fault: BaseException) -> None:
        """Weights first, then the claim, then the others' shares: nobody grows into memory that is not free."""
        seconds = time.monotonic() - slot.state_since
        self._abandoned.set()
        slot.engine.close()
        self.memory.clear_cache()
        self.memory.release(slot.name)
        self._remove(slot)
        with self._share_gate:
            self.memory.share_out(check=False)
        self._tell_failure(slot, seconds, fault)

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
            engine=self._new_engine(model.name, codec, load),
            created_unix_seconds=model.created_unix_seconds,
        )

    def _new_engine(self, name: str, codec: ChatCodec, load: Callable[[], LoadedModel]) -> Engine:
        options = engine_options(self._settings.engine, self._settings.media.encoded_bytes)
        options = replace(
            options,
            max_rows=self._settings.max_rows_of(name),
            most_arrays=self._settings.memory.live_arrays // self._settings.slots.max_models,
        )
        return Engine(name, codec, load, options, self.memory.new_share(name))

    def _make_place(self, name: str, *, evict: bool) -> None:
        """A free slot, by evicting the one that is idle for longest if need be."""
        most = self._settings.slots.max_models
        while len(self._slots) >= most:
            if not (evict and self._evict()):
                raise NoSlotFree(f"{most} models are loaded, and {name} would be one more; all are in use")

    def _make_room(self, slot: Slot, *, evict: bool) -> None:
        """Claim the weights' memory, by evicting idle models if need be."""
        weights = estimated_weight_bytes(slot.path, slot.description)
        while not self.memory.claim(slot.name, weights):
            if evict and self._evict():
                continue
            self.memory.clear_cache()
            if self.memory.claim(slot.name, weights):
                return
            raise self.memory.refusal(slot.name, weights)

    def _check_open(self) -> None:
        if self._closing:
            raise Draining("the server is shutting down")

    # --- eviction ---------------------------------------------------------------------------

    def _evict(self, wanted: Callable[[Slot], bool] = lambda _: True) -> bool:
        """Unload the ``wanted`` slot that is idle for longest; False if there is none.

        Choice and mark are one step, so whoever comes later does not get the slot any more.
        """
        with self._table:
            idle = [slot for slot in self._slots.values() if wanted(slot) and slot.is_idle]
            if not idle:
                return False
            slot = min(idle, key=lambda each: each.used_at)
            before = self._enter_state(slot, "unloading")
        self._emit(slot, "unloading", before)
        self._take_down(slot)
        return True

    def _take_down(self, slot: Slot) -> None:
        """Free a slot that is marked as unloading; its weights are gone before anybody grows."""
        hangs = slot.engine.status().wedge != "none"
        self._end(slot.engine, STUCK_SECONDS if hangs else UNLOAD_SECONDS, slot.weight_bytes)
        self.memory.clear_cache()
        self._remove(slot)
        self._set_state(slot, "absent")
        with self._share_gate:
            self.memory.share_out(check=False)

    def _end(self, engine: Engine, seconds: float, weight_bytes: int) -> None:
        """Close ``engine``; if its thread hangs, what it holds is counted until it returns."""
        if not engine.close(seconds):
            log.error("an engine's thread hangs in a step and was left behind with its memory")
            self.memory.left_behind.append((_thread_of(engine), weight_bytes + engine.slab_bytes))

    def _remove(self, slot: Slot) -> None:
        with self._table:
            self._slots = {name: each for name, each in self._slots.items() if each is not slot}

    # --- recovery ----------------------------------------------------------------------------

    def recover_wedged(self) -> None:
        """Rebuild the engines that make no progress any more; unload those that wedge again at once.

        One whose thread has ended with an error has no weights left: it is unloaded, and
        loaded again when somebody asks for it.
        """
        for slot in self.slots():
            status = slot.engine.status()
            if slot.state != "serving":
                continue
            if status.failed:
                log.error("the engine of %s has failed: unloaded", slot.name)
                self.unload(slot.name)
            elif status.wedge == "confirmed":
                now = time.monotonic()
                if slot.recovered_at is not None and now - slot.recovered_at < COOLDOWN_SECONDS:
                    log.error("%s is wedged again: unloaded", slot.name)
                    self.unload(slot.name)
                else:
                    slot.recovered_at = now
                    self._recover(slot)

    def _recover(self, slot: Slot) -> None:
        """A new engine over the same weights, with the same grant; the other slots see nothing of it."""
        with self._table:
            if slot.state != "serving":
                return
            before = self._enter_state(slot, "reloading")
        self._emit(slot, "reloading", before)
        model = slot.engine.model
        self._end(slot.engine, STUCK_SECONDS, 0)
        self.memory.clear_cache()
        engine = self._new_engine(slot.name, slot.codec, lambda: model)
        try:
            engine.load_model()
            engine.start(slot.grant_bytes, self.memory.budget(), slot.prefix)
            with self._share_gate, self._table:
                if not self._is_reloading(slot):
                    raise Draining(f"{slot.name} was unloaded meanwhile")
                slot.engine = engine
                engine.resize(slot.grant_bytes)
            self.memory.clear_cache()
            self.memory.check_serves(slot)
        except Exception as fault:
            log.error("%s was not recovered: %s", slot.name, fault)
            engine.close()
            del model
            self.unload(slot.name)
        else:
            self._set_state(slot, "serving")

    def _is_reloading(self, slot: Slot) -> bool:
        """Whether nobody has unloaded the slot since its recovery began."""
        return slot.state == "reloading"

    # --- telling --------------------------------------------------------------------------

    def _not_found(self, name: str) -> ModelNotFound:
        served = ", ".join(model.name for model in self.known()) or "none"
        return ModelNotFound(f"no model {name!r} is served here (served: {served})", param="model")

    def _enter_state(self, slot: Slot, state: SlotState) -> float:
        """Change the state; returns the seconds that the one before lasted."""
        now = time.monotonic()
        seconds, slot.state, slot.state_since = now - slot.state_since, state, now
        log.info("%s: %s", slot.name, state)
        return seconds

    def _set_state(self, slot: Slot, state: SlotState) -> None:
        with self._table:
            seconds = self._enter_state(slot, state)
        self._emit(slot, state, seconds)

    def _emit(self, slot: Slot, state: SlotState, seconds: float, error_code: str | None = None) -> None:
        self._emitter.emit(
            SlotChanged(
                model=slot.name,
                family=slot.description.family,
                state=state,
                seconds=seconds,
                error_code=error_code,
            )
        )

    def _tell_failure(self, slot: Slot, seconds: float, fault: BaseException) -> None:
        code = fault.code if isinstance(fault, DarkbloomError) else "internal_error"
        if not isinstance(fault, KeyboardInterrupt):
            log.error("%s was not loaded: %s", slot.name, fault)
        self._emit(slot, "failed", seconds, code)

    def _wake_engines(self) -> None:
        for slot in self.slots():
            slot.engine.wake()

    def _sample_engines(self) -> None:
        for slot in self.slots():
            for event in engine_samples(slot.name, slot.activity, slot.engine.status()):
                self._emitter.emit(event)


def _thread_of(engine: Engine) -> Callable[[], bool]:
    """Whether the engine's thread still runs, without holding on to anything else of it."""
    return lambda: engine.alive


def _until(abandoned: threading.Event, progress: Progress | None) -> Progress:
    """``progress``, but once ``abandoned`` is set a load ends at its next report instead of running to its end."""

    def report(done_bytes: int, total_bytes: int) -> None:
        if abandoned.is_set():
            raise CheckpointError("the load was abandoned")
        if progress is not None:
            progress(done_bytes, total_bytes)

    return report
