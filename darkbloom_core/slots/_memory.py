"""What slots do with memory: check that a model fits, divide KV among those that are loaded, measure afterwards.

Always true: the grants of all slots never add up to more than the budget, since shares
shrink before one grows; a refused load changes no grant.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from darkbloom_core.contracts import Emitter, LedgerStuck, ReservationDropped
from darkbloom_core.errors import GrantTooSmall, ModelDoesNotFit
from darkbloom_core.memory import (
    Ledger,
    LoadCheck,
    MemoryTerms,
    Pool,
    Reading,
    Readings,
    Reclaimer,
    Share,
    StuckLedger,
    cap_fraction,
    kv_grants,
)
from darkbloom_core.settings import MemorySettings
from darkbloom_core.slots._slot import Slot

log = logging.getLogger(__name__)

RETRY_SECONDS = 30
"""When to come back after a model did not fit."""


def memory_terms(
    settings: MemorySettings, physical_bytes: int, measured_activation_bytes: int = 0
) -> MemoryTerms:
    """The memory terms of a machine of ``physical_bytes`` under ``settings``: the loader's and the doctor's."""
    configured = settings.physical_bytes
    return MemoryTerms(
        physical_bytes=physical_bytes if configured is None else min(configured, physical_bytes),
        operator_reserve_bytes=settings.reserve_bytes,
        fraction=cap_fraction(settings.cap_fraction),
        activation_bytes=settings.activation_bytes,
        measured_activation_bytes=measured_activation_bytes,
    )


def check_load(
    terms: MemoryTerms,
    found: Reading,
    weight_bytes: int | None,
    *,
    outstanding_bytes: int = 0,
    loaded_weight_bytes: int = 0,
) -> LoadCheck:
    """The one gate of every load: the loader, the doctor and the planner all ask here."""
    return terms.check_load(
        weight_bytes,
        used_bytes=found.used_bytes,
        system_free_bytes=found.free_bytes,
        outstanding_bytes=outstanding_bytes,
        loaded_weight_bytes=loaded_weight_bytes,
    )


def kv_budget(settings: MemorySettings, terms: MemoryTerms, weight_bytes: int) -> int:
    """KV bytes for all models whose weights together take ``weight_bytes``."""
    return settings.kv_bytes if settings.kv_bytes is not None else terms.kv_budget(weight_bytes)


class Granted(Protocol):
    """Who gets a grant: a slot, or a model on paper."""

    @property
    def name(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def slab_bytes(self) -> int: ...


def check_grants(
    settings: MemorySettings, terms: MemoryTerms, models: Sequence[Granted], grants: Sequence[int]
) -> None:
    """Raise ``GrantTooSmall`` if one would get less than the minimum, or less than its slabs hold already."""
    for model, grant in zip(models, grants, strict=True):
        least = model.slab_bytes
        if settings.kv_bytes is None:
            least = max(least, terms.minimum_kv(model.weight_bytes))
        if grant < least:
            raise GrantTooSmall(
                f"{model.name} would be left with {grant} bytes of KV memory and needs {least}",
                retry_after_seconds=RETRY_SECONDS,
            )


class SlotMemory:
    """``slots`` gives every slot that holds memory; ``on_flushed`` is called when memory became free.

    ``emitter`` is told of a ledger that refuses everybody.
    """

    def __init__(
        self,
        settings: MemorySettings,
        readings: Readings,
        slots: Callable[[], Iterable[Slot]],
        on_flushed: Callable[[], None],
        emitter: Emitter,
    ) -> None:
        self._settings = settings
        self._emitter = emitter
        self._readings = readings
        self._slots = slots
        self._numbers = itertools.count()
        self.reclaimer = Reclaimer(readings, on_flushed, self._trim_for)
        self.ledger = Ledger(
            self._headroom,
            unified=readings.unified,
            on_shortfall=self.reclaimer.want,
            on_stuck=self._tell_stuck,
        )
        self.left_behind: list[tuple[Callable[[], bool], int]] = []

    def close(self) -> None:
        """End the reclaimer's thread. Idempotent."""
        self.reclaimer.close()

    def new_share(self, name: str) -> Share:
        """A share of the ledger for an engine of the model ``name``; the limit comes with its grant."""
        return self.ledger.share(f"{name}#{next(self._numbers)}")

    def terms(self) -> MemoryTerms:
        """The terms now: what warm-up measured so far is in them."""
        measured = sum(slot.activation_bytes for slot in self._slots())
        return memory_terms(self._settings, self._readings.read("device").physical_bytes, measured)

    # --- loading -----------------------------------------------------------------------

    def claim(self, name: str, weight_bytes: int) -> bool:
        """Reserve a model's weights if they fit now, in one step with the check; prefix caches give way."""
        if self._claim(name, weight_bytes):
            return True
        if self.trim_caches(weight_bytes) == 0:
            return False
        self.clear_cache()
        return self._claim(name, weight_bytes)

    def _claim(self, name: str, weight_bytes: int) -> bool:
        terms, loaded, found = self.terms(), self._weight_bytes(), self._readings.read("device")

        def admits(outstanding_bytes: int) -> bool:
            check = check_load(
                terms,
                found,
                weight_bytes,
                outstanding_bytes=outstanding_bytes,
                loaded_weight_bytes=loaded,
            )
            log.info("%s needs %s bytes to load, %s are free", name, check.required_bytes, check.free_bytes)
            return check.verdict == "fits"

        return self.ledger.claim_load(_claim(name), weight_bytes, admits)

    def trim_caches(self, size_bytes: int) -> int:
        """Let prefix caches drop so many bytes, of the model that nobody used for longest first; gives what they did."""
        dropped = 0
        for slot in sorted(self._slots(), key=lambda slot: slot.used_at):
            if dropped < size_bytes:
                dropped += slot.engine.trim_cache(size_bytes - dropped)
        return dropped

    def _trim_for(self, shortfall_bytes: int) -> None:
        """Somebody lacked so many bytes: what MLX only keeps for later is there for them first."""
        self.trim_caches(shortfall_bytes - self._readings.read("device").cached_bytes)

    def release(self, name: str) -> None:
        """The weights are visible in the readings now, or gone. Idempotent."""
        self.ledger.release(_claim(name))

    def clear_cache(self) -> None:
        """Before measuring: what MLX only keeps for later goes back."""
        self._readings.clear_cache()

    def refusal(self, name: str, weight_bytes: int) -> ModelDoesNotFit:
        """What to say when ``claim`` was refused."""
        need = self.terms().load_headroom(weight_bytes, self._weight_bytes())
        return ModelDoesNotFit(
            f"{name} may take {weight_bytes} bytes while it loads and needs {need} more to serve, "
            "which are not free now",
            retry_after_seconds=RETRY_SECONDS,
        )

    def check_serves(self, slot: Slot) -> None:
        """After the cache was cleared: raise ``ModelDoesNotFit`` unless what is left is enough to serve.

        The slot's own KV slabs, if it has them yet, count as left: they serve. So do prefix
        caches, which give way.
        """
        terms, found = self.terms(), self._readings.read("device")
        weights = self._weight_bytes()
        left = terms.live_headroom(found.used_bytes, found.free_bytes, weights) + slot.slab_bytes
        left += sum(each.engine.cache_bytes for each in self._slots())
        if not terms.serves_after_load(left, self.ledger.outstanding_bytes("device"), slot.weight_bytes):
            raise ModelDoesNotFit(
                f"with {slot.name} loaded only {left} bytes are left, too little to serve with",
                retry_after_seconds=RETRY_SECONDS,
            )

    # --- sharing -------------------------------------------------------------------------

    def budget(self) -> int:
        """KV bytes for all slots together."""
        return kv_budget(self._settings, self.terms(), self._weight_bytes() + self._left_behind_bytes())

    def share_out(self, *, check: bool) -> None:
        """Divide the budget anew: first those shrink that must, then the others grow.

        With ``check`` raise ``GrantTooSmall`` instead, changing nothing, if a slot would
        get less than the minimum, or less than its slabs hold already.
        """
        slots, budget = list(self._slots()), self.budget()
        grants = kv_grants(budget, [slot.demand for slot in slots])
        if check:
            check_grants(self._settings, self.terms(), slots, grants)
        changed = [
            (slot, grant) for slot, grant in zip(slots, grants, strict=True) if grant != slot.grant_bytes
        ]
        for slot, grant in sorted(changed, key=lambda pair: pair[1] > pair[0].grant_bytes):
            slot.grant_bytes = grant
            slot.engine.resize(grant)

    # --- readings --------------------------------------------------------------------------

    def _headroom(self, pool: Pool) -> int:
        found = self._readings.read(pool)
        if pool == "device" or self._readings.unified:
            return self.terms().live_headroom(found.used_bytes, found.free_bytes, self._weight_bytes())
        return memory_terms(self._settings, found.physical_bytes).live_headroom(0, found.free_bytes, 0)

    def _tell_stuck(self, stuck: StuckLedger) -> None:
        found = self._readings.read("device")
        self._emitter.emit(
            LedgerStuck(
                streak_seconds=stuck.streak_seconds,
                reservations=len(stuck.held),
                reserved_bytes=sum(entry.size_bytes for entry in stuck.held),
                used_bytes=found.used_bytes,
                cached_bytes=found.cached_bytes,
                system_free_bytes=found.free_bytes,
            )
        )
        for entry in stuck.dropped:
            age = stuck.now - entry.made_at
            self._emitter.emit(
                ReservationDropped(kind=entry.kind, age_seconds=age, size_bytes=entry.size_bytes)
            )

    def _weight_bytes(self) -> int:
        return sum(slot.weight_bytes for slot in self._slots())

    def _left_behind_bytes(self) -> int:
        """What engines hold whose threads are stuck; forgotten once their thread has ended."""
        self.left_behind = [(alive, size) for alive, size in self.left_behind if alive()]
        return sum(size for _, size in self.left_behind)


def _claim(name: str) -> str:
    return f"load of {name}"
