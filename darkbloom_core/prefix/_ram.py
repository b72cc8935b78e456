"""The RAM tier: packed parts of one model as the engine's own objects, within a byte budget. Thread-safe.

Two classes share the budget: full parts, and tails (window and state parts). Each has a
guaranteed share, and may use what the other leaves. Within what a class may lose, the part
with the lowest priority goes first: milliseconds saved per byte, times how often it was used
(up to ``MOST_USES``), plus the priority of the last part that went, so what nobody asks
for goes in the end whatever it is worth. A tail's first use counts for nothing: a
conversation that goes on leaves it behind and brings a later one.

Always true: a part that is pinned stays; whoever holds a block's full part holds those of
all blocks before it; a newcomer never takes the other class below its guaranteed share;
unless pinned parts forbid it, what is held fits the budget, also right after it shrank;
there are never more parts than there may be.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeAlias

from darkbloom_core.contracts import PartKey, TierStats

GUARANTEED_SHARE = 0.5
"""Of the budget, for each of the two classes."""

MOST_USES = 4

Class: TypeAlias = Literal["full", "tail"]
CLASSES: tuple[Class, Class] = ("full", "tail")


@dataclass(slots=True, eq=False)
class _Held:
    key: PartKey
    item: Any
    size_bytes: int
    parent: bytes | None
    worth: float  # milliseconds saved per byte
    uses: int = 0
    pins: int = 0
    rank: tuple[float, int] = (0.0, 0)
    children: int = 0

    @property
    def kind(self) -> Class:
        return "full" if self.key.part == "full" else "tail"


class Pins:
    """Parts that stay until ``release``, which is idempotent. ``items`` are in the order asked for."""

    def __init__(self, items: tuple[Any, ...], release: Callable[[], None]) -> None:
        self.items = items
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let the parts go."""
        release, self._release, self.items = self._release, None, ()
        if release is not None:
            release()

    def __enter__(self) -> Pins:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RamTier:
    """``limit_bytes`` may be changed at any time; 0 keeps nothing. ``most_parts`` bounds how many parts there are."""

    def __init__(self, limit_bytes: int, most_parts: int | None = None) -> None:
        self._most_parts = most_parts
        self._lock = threading.RLock()
        self._limit_bytes = max(0, limit_bytes)
        self._held: dict[PartKey, _Held] = {}
        self._used: dict[Class, int] = dict.fromkeys(CLASSES, 0)
        self._heaps: dict[Class, list[tuple[tuple[float, int], PartKey]]] = {kind: [] for kind in CLASSES}
        self._lowest = 0.0
        self._ticks = 0
        self._counts = dict.fromkeys(("hits", "misses", "offered", "dropped", "evicted"), 0)

    def probe(self, key: PartKey) -> int | None:
        """The part's size, or None. Counts as no use."""
        with self._lock:
            held = self._held.get(key)
            return None if held is None else held.size_bytes

    def get(self, key: PartKey) -> Any | None:
        """What is held under ``key``, or None. Counts as no use, and pins nothing."""
        with self._lock:
            held = self._held.get(key)
            return None if held is None else held.item

    def keep(
        self,
        key: PartKey,
        item: Any,
        size_bytes: int,
        *,
        saves_milliseconds: float,
        parent: bytes | None = None,
    ) -> bool:
        """Hold ``item``, or renew what is held already; True if the part is held afterwards.

        ``parent`` is the name of the block before, None for a first block. A full part whose
        parent's is not held is refused, as is one that does not fit, however much is dropped.
        """
        with self._lock:
            self._counts["offered"] += 1
            held = self._held.get(key)
            if held is not None:
                self._renew(held)
                return True
            held = _Held(key, item, size_bytes, parent, saves_milliseconds / max(1, size_bytes))
            if held.kind == "tail":
                held.parent = parent = None
            before = None if parent is None else self._held.get(PartKey(parent, "full"))
            if (
                size_bytes <= 0
                or (parent is not None and before is None)
                or not self._make_room(held, before)
            ):
                self._counts["dropped"] += 1
                return False
            self._held[key] = held
            self._used[held.kind] += size_bytes
            if before is not None:
                before.children += 1
            self._rank(held)
            return True

    def renew(self, keys: Iterable[PartKey]) -> None:
        """These parts will be needed again, by what was kept just now: their priority is that of newcomers."""
        with self._lock:
            for key in keys:
                held = self._held.get(key)
                if held is not None:
                    self._renew(held)

    def pin(self, keys: Sequence[PartKey]) -> Pins | None:
        """Use these parts: all of them are held and stay until the pins are released; None if one is missing."""
        with self._lock:
            found = [self._held.get(key) for key in keys]
            parts = [held for held in found if held is not None]
            self._counts["hits"] += len(parts)
            self._counts["misses"] += len(found) - len(parts)
            if len(parts) < len(found):
                return None
            for held in parts:
                held.pins += 1
                held.uses = min(MOST_USES, held.uses + 1)
                if held.kind == "full" or held.uses > 1:
                    self._rank(held)
            return Pins(tuple(held.item for held in parts), lambda: self._unpin(parts))

    def resize(self, limit_bytes: int) -> int:
        """Set the budget; drop what no longer fits, except what is pinned, at once. Gives the bytes held then."""
        with self._lock:
            self._limit_bytes = max(0, limit_bytes)
            self._shrink()
            return self._total

    @property
    def bytes_used(self) -> int:
        with self._lock:
            return self._total

    @property
    def parts(self) -> int:
        """How many parts are held."""
        return len(self._held)

    def stats(self) -> TierStats:
        """Counts, and bytes held; ``detail`` has the bytes by part and those that are pinned."""
        with self._lock:
            detail = {"full_bytes": 0, "window_bytes": 0, "state_bytes": 0, "pinned_bytes": 0}
            for held in self._held.values():
                detail[f"{held.key.part}_bytes"] += held.size_bytes
                detail["pinned_bytes"] += held.size_bytes if held.pins else 0
            return TierStats(
                parts=len(self._held),
                bytes_used=self._total,
                bytes_limit=self._limit_bytes,
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                offered=self._counts["offered"],
                dropped=self._counts["dropped"],
                evicted=self._counts["evicted"],
                detail=detail,
            )

    # --- inside, under the lock ---------------------------------------------------------

    @property
    def _total(self) -> int:
        return sum(self._used.values())

    @property
    def _is_full(self) -> bool:
        return self._most_parts is not None and len(self._held) >= self._most_parts

    def _guaranteed(self, kind: Class) -> float:
        share = GUARANTEED_SHARE if kind == "full" else 1 - GUARANTEED_SHARE
        return self._limit_bytes * share

    def _unpin(self, parts: Sequence[_Held]) -> None:
        with self._lock:
            for held in parts:
                held.pins -= 1
                self._enter_heap(held)
            self._shrink()

    def _renew(self, held: _Held) -> None:
        if held.kind == "tail":
            held.uses = 0  # what it was used for is behind; what it is kept for now was never used
        self._rank(held)

    def _rank(self, held: _Held) -> None:
        self._ticks += 1
        held.rank = (self._lowest + max(1, held.uses) * held.worth, self._ticks)
        self._enter_heap(held)

    def _enter_heap(self, held: _Held) -> None:
        """What may go is in its class's heap; a place that it has outlived there is skipped when it comes up."""
        if held.pins or held.children or self._held.get(held.key) is not held:
            return
        heap = self._heaps[held.kind]
        heapq.heappush(heap, (held.rank, held.key))
        if len(heap) > 64 + 4 * len(self._held):
            self._heaps[held.kind] = sorted((one.rank, one.key) for one in self._free(held.kind))

    def _free(self, kind: Class) -> Iterator[_Held]:
        return (one for one in self._held.values() if one.kind == kind and not one.pins and not one.children)

    def _first_to_go(self, kind: Class, spared: _Held | None = None) -> _Held | None:
        heap, found, aside = self._heaps[kind], None, []
        while heap and found is None:
            rank, key = heap[0]
            held = self._held.get(key)
            if held is None or held.rank != rank or held.pins or held.children:
                heapq.heappop(heap)
            elif held is spared:
                aside.append(heapq.heappop(heap))
            else:
                found = held
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def _make_room(self, newcomer: _Held, parent: _Held | None) -> bool:
        """Drop what must go for ``newcomer``, its parent spared. False if that is not possible; some may be gone."""
        own: Class = newcomer.kind
        other: Class = "tail" if own == "full" else "full"
        if newcomer.size_bytes > self._limit_bytes:
            return False
        while self._total + newcomer.size_bytes > self._limit_bytes or self._is_full:
            mine, theirs = self._first_to_go(own, parent), self._first_to_go(other)
            if theirs is not None and self._used[other] - theirs.size_bytes < self._guaranteed(other):
                theirs = None
            is_entitled = self._used[own] + newcomer.size_bytes <= self._guaranteed(own)
            victim = mine
            if theirs is not None and (mine is None or is_entitled or theirs.rank < mine.rank):
                victim = theirs
            if victim is None:
                return False
            self._drop(victim)
        return True

    def _shrink(self) -> None:
        while self._total > self._limit_bytes:
            candidates = [one for kind in CLASSES if (one := self._first_to_go(kind)) is not None]
            if not candidates:
                return
            over = [one for one in candidates if self._used[one.kind] > self._guaranteed(one.kind)]
            self._drop(min(over or candidates, key=lambda one: one.rank))

    def _drop(self, held: _Held) -> None:
        del self._held[held.key]
        self._used[held.kind] -= held.size_bytes
        self._lowest = max(self._lowest, held.rank[0])
        self._counts["evicted"] += 1
        if held.parent is not None:
            before = self._held[PartKey(held.parent, "full")]
            before.children -= 1
            self._enter_heap(before)
