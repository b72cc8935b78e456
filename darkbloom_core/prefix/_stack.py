"""The RAM tier and the tiers below it as one: where parts are, fetching them, offering them.

Always true: a tier below that fails in any way only ever misses, and each fault is counted;
bytes are reserved in the ledger before a buffer is made for them, and given back when the
staging is closed and no tier writes to its buffers any more.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from darkbloom_core.contracts import CacheTier, Fetch, PartKey, TierStats
from darkbloom_core.memory import Ledger
from darkbloom_core.prefix._layout import PART_NAMES, PartName, PromptParts
from darkbloom_core.prefix._plan import PlannedFetch, ReusePlan, Where
from darkbloom_core.prefix._ram import Pins, RamTier

log = logging.getLogger(__name__)

RAM = "ram"
"""The RAM tier's place in plans and costs; the tiers below have their own names."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A part that has come: ``item`` as the RAM tier held it, or the ``data`` of a tier below."""

    block: int
    part: PartName
    item: Any | None
    data: memoryview | None


class CacheStack:
    """One model's tiers. ``lower`` are the open tiers below RAM, fastest first, by name. Thread-safe."""

    def __init__(self, ram: RamTier, lower: Mapping[str, CacheTier], ledger: Ledger) -> None:
        self.ram = ram
        self._lower = {name: _Guarded(name, tier) for name, tier in lower.items()}
        self._ledger = ledger

    def where(self, names: Sequence[bytes], parts: PromptParts) -> Where:
        """What the planner asks of a prompt's blocks: each part's first place from the top, as it is now."""
        sizes = {
            (block, part): size
            for block in range(len(names))
            for part in PART_NAMES
            if (size := parts.part_bytes(block, part))
        }
        places = {one: RAM for one in sizes if self.ram.probe(PartKey(names[one[0]], one[1])) is not None}
        for place, tier in self._lower.items():
            asked = [one for one in sizes if one not in places]
            found = tier.probe([PartKey(names[block], part) for block, part in asked])
            places |= {one: place for one, size in zip(asked, found, strict=True) if size == sizes[one]}
        return lambda block, part: places.get((block, part))

    def stage(self, request: str, plan: ReusePlan, names: Sequence[bytes]) -> Staging | None:
        """Begin to fetch what ``plan`` asks for; None if something has gone, or memory is short.

        Buffers for what comes from below RAM are reserved as ``blocks`` on the host. The
        caller closes the staging, whichever way the request goes.
        """
        staging = Staging(self._ledger, f"staging/{request}")
        try:
            is_begun = self._begin(staging, plan, names)
        except BaseException:
            staging.close()
            raise
        if is_begun:
            return staging
        staging.close()
        return None

    def offer(
        self,
        key: PartKey,
        item: Any,
        size_bytes: int,
        *,
        saves_milliseconds: float,
        parent: bytes | None,
        data: Callable[[], memoryview],
    ) -> bool:
        """Keep a part that prefill computed, in RAM and below; True if RAM holds it.

        ``data`` gives its bytes, and is called only if a tier below wants them.
        """
        is_held = self.promote(key, item, size_bytes, saves_milliseconds=saves_milliseconds, parent=parent)
        self.offer_below(key, data)
        return is_held

    def offer_below(self, key: PartKey, data: Callable[[], memoryview]) -> None:
        """Offer a part to those tiers below RAM that have it not; ``data`` as in ``offer``."""
        lower = [tier for tier in self._lower.values() if tier.probe([key]) == [None]]
        if lower:
            view = data()
            for tier in lower:
                tier.offer(key, view)

    @property
    def has_lower(self) -> bool:
        """Whether there is any tier below RAM."""
        return bool(self._lower)

    def promote(
        self, key: PartKey, item: Any, size_bytes: int, *, saves_milliseconds: float, parent: bytes | None
    ) -> bool:
        """Keep a part in RAM alone, as the engine's own object; in the order of blocks."""
        return self.ram.keep(key, item, size_bytes, saves_milliseconds=saves_milliseconds, parent=parent)

    def used(self, keys: Sequence[PartKey]) -> tuple[PartKey, ...]:
        """Tell the tiers below RAM that a prompt consists of these parts, in the order of its blocks.

        Gives those that one of them would take now: prompts that come back are worth offering
        again, and what RAM serves is not forgotten below.
        """
        wanted: dict[PartKey, None] = {}
        for tier in self._lower.values():
            wanted |= {key: None for key, is_wanted in zip(keys, tier.used(keys), strict=True) if is_wanted}
        return tuple(wanted)

    def stats(self) -> dict[str, TierStats]:
        """By place; a tier that cannot say is left out."""
        found = {RAM: self.ram.stats()}
        for name, tier in self._lower.items():
            stats = tier.stats()
            if stats is not None:
                found[name] = stats
        return found

    def faults(self) -> dict[str, int]:
        """How often each tier below raised or answered nonsense."""
        return {name: tier.faults for name, tier in self._lower.items()}

    def close(self) -> None:
        """Empty RAM, but for what is pinned, and close the tiers below."""
        self.ram.resize(0)
        for tier in self._lower.values():
            tier.close()

    def _begin(self, staging: Staging, plan: ReusePlan, names: Sequence[bytes]) -> bool:
        keys = {fetch: PartKey(names[fetch.block], fetch.part) for fetch in plan.fetches}
        held = [fetch for fetch in plan.fetches if fetch.place == RAM]
        below = [fetch for fetch in plan.fetches if fetch.place != RAM]
        pins = self.ram.pin([keys[fetch] for fetch in held])
        if pins is None:
            return False
        staging.hold(pins, held)
        if below and not staging.reserve(sum(fetch.size_bytes for fetch in below)):
            return False
        for place in dict.fromkeys(fetch.place for fetch in below):
            mine = [fetch for fetch in below if fetch.place == place]
            buffers = [new_buffer(fetch.size_bytes) for fetch in mine]
            future = self._lower[place].fetch(
                [Fetch(keys[fetch], buffer) for fetch, buffer in zip(mine, buffers, strict=True)]
            )
            if future is None:
                return False
            staging.expect(future, mine, buffers)
        return True


def new_buffer(size_bytes: int) -> memoryview:
    """Bytes for a tier to write to, in pages that go back to the system with the last view of them.

    Whoever writes first, the tier's threads, makes the pages; zeros would be written here and now.
    """
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Staging:
    """The parts of one plan on their way. ``close`` gives back all it holds, and is idempotent."""

    def __init__(self, ledger: Ledger, key: str) -> None:
        self._ledger = ledger
        self._key = key
        self._lock = threading.Lock()
        self._pins: Pins | None = None
        self._held: tuple[PlannedFetch, ...] = ()
        self._coming: list[tuple[Future[Sequence[bool]], list[PlannedFetch], list[memoryview]]] = []
        self._is_reserved = False
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """Whether nothing is on its way any more."""
        return all(future.done() for future, _, _ in self._coming)

    def when_ready(self, call: Callable[[], None]) -> None:
        """``call`` after each tier has answered, from any thread; ``is_ready`` says whether it was the last."""
        for future, _, _ in self._coming:
            future.add_done_callback(lambda _: call())

    def parts(self) -> tuple[StagedPart, ...] | None:
        """All parts, by block; None if one of them did not come. Only when ``is_ready``, until ``close``."""
        assert self._pins is not None
        found = [
            StagedPart(fetch.block, fetch.part, item, None)
            for fetch, item in zip(self._held, self._pins.items, strict=True)
        ]
        for future, fetches, buffers in self._coming:
            if future.cancelled() or future.exception() is not None:
                return None
            filled = future.result()
            if len(filled) != len(fetches) or not all(filled):
                return None
            found += [
                StagedPart(fetch.block, fetch.part, None, buffer)
                for fetch, buffer in zip(fetches, buffers, strict=True)
            ]
        return tuple(sorted(found, key=lambda one: (one.block, PART_NAMES.index(one.part))))

    def close(self) -> None:
        """Let the pins go at once, and the reservation as soon as no tier writes to the buffers any more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._pins is not None:
            self._pins.release()
        for future, _, _ in tuple(self._coming):
            future.cancel()
            future.add_done_callback(lambda _: self._give_back())
        self._give_back()

    # --- filled by the stack ----------------------------------------------------------

    def hold(self, pins: Pins, fetches: Sequence[PlannedFetch]) -> None:
        self._pins, self._held = pins, tuple(fetches)

    def reserve(self, size_bytes: int) -> bool:
        self._is_reserved = self._ledger.reserve(
            self._key, size_bytes, "blocks", "host", is_held=lambda: self._is_reserved
        )
        return self._is_reserved

    def expect(
        self, future: Future[Sequence[bool]], fetches: list[PlannedFetch], buffers: list[memoryview]
    ) -> None:
        self._coming.append((future, fetches, buffers))

    def _give_back(self) -> None:
        with self._lock:
            if not self._is_reserved or not self.is_ready:
                return
            self._is_reserved = False
            self._coming.clear()
        self._ledger.release(self._key)


class _Guarded:
    """A tier below whose faults stay its own: counted, and the first one logged."""

    def __init__(self, name: str, tier: CacheTier) -> None:
        self._name = name
        self._tier = tier
        self.faults = 0

    def probe(self, keys: Sequence[PartKey]) -> Sequence[int | None]:
        found = self._ask(lambda: list(self._tier.probe(keys)))
        if found is not None and len(found) != len(keys):
            self._fault(ValueError(f"{len(keys)} keys were probed, {len(found)} answers came"))
            found = None
        return [None] * len(keys) if found is None else found

    def fetch(self, fetches: Sequence[Fetch]) -> Future[Sequence[bool]] | None:
        return self._ask(lambda: self._tier.fetch(fetches))

    def offer(self, key: PartKey, data: memoryview) -> bool:
        return bool(self._ask(lambda: self._tier.offer(key, data)))

    def used(self, keys: Sequence[PartKey]) -> Sequence[bool]:
        found = self._ask(lambda: list(self._tier.used(keys)))
        if found is not None and len(found) != len(keys):
            self._fault(ValueError(f"{len(keys)} keys were used, {len(found)} answers came"))
            found = None
        return [False] * len(keys) if found is None else found

    def stats(self) -> TierStats | None:
        return self._ask(self._tier.stats)

    def close(self) -> None:
        self._ask(self._tier.close)

    def _ask(self, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception as fault:  # whatever a plugin raises: its tier misses
            self._fault(fault)
            return None

    def _fault(self, fault: Exception) -> None:
        self.faults += 1
        if self.faults == 1:
            log.error("the cache tier %s failed and counts as empty: %r", self._name, fault)
