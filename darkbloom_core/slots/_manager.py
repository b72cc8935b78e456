"""Loads models into slots, shares KV memory among them, and lets them go.

Always true: one model loads at a time; the grants of all slots never add up to more than
the budget, since shares shrink before one grows; a failed load leaves no slot behind and
the others' grants as they were.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import read_config
from darkbloom_core.contracts import (
    Emitter,
    EngineSample,
    ModelFamily,
    Placement,
    Progress,
    SlotChanged,
    SlotState,
)
from darkbloom_core.engine import Engine, EngineOptions
from darkbloom_core.errors import CheckpointError, DarkbloomError, Draining, ModelNotFound, ModelNotReady
from darkbloom_core.memory import (
    activation_reserve,
    effective_cap,
    hard_cap,
    kv_budget,
    physical_memory_bytes,
)
from darkbloom_core.settings import EngineSettings, Settings
from darkbloom_core.slots._defaults import sampling_defaults
from darkbloom_core.slots._device import current_device
from darkbloom_core.slots._slot import Slot

log = logging.getLogger(__name__)

FamilyFor = Callable[[Mapping[str, Any]], ModelFamily]


def engine_options(settings: EngineSettings) -> EngineOptions:
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
    )


class SlotManager:
    """Thread-safe. ``family_for`` finds the installed family that reads a config."""

    def __init__(
        self,
        settings: Settings,
        family_for: FamilyFor,
        emitter: Emitter,
        physical_bytes: Callable[[], int] = physical_memory_bytes,
    ) -> None:
        self._settings = settings
        self._family_for = family_for
        self._emitter = emitter
        physical = physical_bytes()
        self._cap_bytes = effective_cap(physical, settings.memory.reserve_bytes)
        self._activation_bytes = activation_reserve(hard_cap(physical))
        self._slots: dict[str, Slot] = {}
        self._load_gate = threading.Lock()
        self._draining = False
        self._closed = threading.Event()
        self._sampler = threading.Thread(target=self._sample_engines, name="engine samples", daemon=True)
        if settings.telemetry.sample_seconds > 0:
            self._sampler.start()

    # --- what requests need -------------------------------------------------------

    def slots(self) -> tuple[Slot, ...]:
        """Every slot, by name."""
        return tuple(slot for _, slot in sorted(dict(self._slots).items()))

    def get(self, name: str) -> Slot:
        """The slot that serves ``name``.

        Raises ``ModelNotFound``, or ``ModelNotReady`` or ``Draining`` where a retry may help.
        """
        slot = self._slots.get(name)
        if slot is None:
            served = ", ".join(sorted(self._slots)) or "none"
            raise ModelNotFound(f"no model {name!r} is served here (served: {served})", param="model")
        if self._draining:
            raise Draining("the server is shutting down")
        if slot.state != "serving":
            raise ModelNotReady(f"{name} is {slot.state}")
        return slot

    # --- loading and letting go -----------------------------------------------------

    def load(self, name: str, path: Path, progress: Progress | None = None) -> Slot:
        """Load the checkpoint at ``path`` and serve it as ``name``; returns when it is warm.

        Raises ``CheckpointError`` for a fault of the checkpoint or a taken name, and
        ``CapacityExhausted`` if no KV memory is left for it. Interrupted (Ctrl-C), the load
        ends at its next report of progress.
        """
        with self._load_gate:
            if name in self._slots:
                raise CheckpointError(f"a model is already served as {name!r}")
            abandoned = threading.Event()
            slot = self._open(name, path, _until(abandoned, progress))
            self._slots[name] = slot
            self._emit(slot, "loading", 0.0)
            try:
                slot.weight_bytes = slot.engine.load_model()
                self._set_state(slot, "warming")
                self._shrink_for(slot)
                slot.engine.start(self._share(), self._budget())
            except BaseException as fault:  # Ctrl-C too, which leaves the engine's thread loading
                abandoned.set()
                slot.engine.close()
                del self._slots[name]
                self._grow_survivors()
                code = fault.code if isinstance(fault, DarkbloomError) else "internal_error"
                self._emit(slot, "failed", time.monotonic() - slot.state_since, code)
                raise
            self._set_state(slot, "serving")
            return slot

    def unload(self, name: str) -> None:
        """End the slot's requests, free its memory, and give its share to the others; no-op if absent."""
        with self._load_gate:
            slot = self._slots.get(name)
            if slot is None:
                return
            self._set_state(slot, "unloading")
            slot.engine.close()
            del self._slots[name]
            self._set_state(slot, "absent")
            self._grow_survivors()

    def drain(self) -> None:
        """Take no new requests; those that run go on."""
        self._draining = True
        for slot in self.slots():
            slot.engine.drain()

    def close(self) -> None:
        """Unload everything. Idempotent."""
        self.drain()
        self._closed.set()
        for slot in self.slots():
            self.unload(slot.name)

    # --- inside -----------------------------------------------------------------------

    def _open(self, name: str, path: Path, progress: Progress) -> Slot:
        config = read_config(path)
        family = self._family_for(config)
        device = current_device()
        description = family.describe(config, device)
        codec = family.codec(path, description)
        engine = Engine(
            name,
            codec,
            lambda: family.load(path, description, Placement(device), progress),
            engine_options(self._settings.engine),
        )
        return Slot(
            name=name,
            path=path,
            description=description,
            codec=codec,
            defaults=sampling_defaults(path),
            engine=engine,
        )

    def _budget(self) -> int:
        """KV bytes for all slots together."""
        if self._settings.memory.kv_bytes is not None:
            return self._settings.memory.kv_bytes
        weights = sum(slot.weight_bytes for slot in self._slots.values())
        return kv_budget(self._cap_bytes, weights, self._activation_bytes)

    def _share(self) -> int:
        return self._budget() // max(1, len(self._slots))

    def _shrink_for(self, newcomer: Slot) -> None:
        share = self._share()
        for slot in self._slots.values():
            if slot is not newcomer:
                slot.engine.resize(share)

    def _grow_survivors(self) -> None:
        share = self._share()
        for slot in self._slots.values():
            slot.engine.resize(share)

    def _set_state(self, slot: Slot, state: SlotState) -> None:
        now = time.monotonic()
        seconds, slot.state, slot.state_since = now - slot.state_since, state, now
        log.info("%s: %s", slot.name, state)
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

    def _sample_engines(self) -> None:
        while not self._closed.wait(self._settings.telemetry.sample_seconds):
            for slot in self.slots():
                status = slot.engine.status()
                self._emitter.emit(
                    EngineSample(
                        model=slot.name,
                        running=status.running,
                        waiting=status.waiting,
                        kv_bytes_used=status.kv_bytes_used,
                        kv_bytes_reserved=status.kv_bytes_reserved,
                        kv_bytes_grant=status.kv_bytes_grant,
                        decode_steps=status.decode_steps,
                        prefill_tokens=status.prefill_tokens,
                        output_tokens=status.output_tokens,
                    )
                )


def _until(abandoned: threading.Event, progress: Progress | None) -> Progress:
    """``progress``, but once ``abandoned`` is set a load ends at its next report instead of running to its end."""

    def report(done_bytes: int, total_bytes: int) -> None:
        if abandoned.is_set():
            raise CheckpointError("the load was abandoned")
        if progress is not None:
            progress(done_bytes, total_bytes)

    return report
