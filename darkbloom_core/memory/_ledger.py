"""One ledger of reserved bytes: whoever is about to use memory reserves it here first.

Always true: check and entry happen under one lock; a reservation is never made that the
pool's headroom, or the share's limit, does not hold; ``release`` is idempotent; a shrunk
limit leaves existing reservations alone; MLX's cache is never flushed on a caller's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from darkbloom_core.memory._audit import STALE_SECONDS, Audit
from darkbloom_core.memory._policy import MOST_BYTES
from darkbloom_core.memory._readings import Pool

log = logging.getLogger(__name__)

Kind = Literal["kv", "load", "media", "blocks"]

Headroom = Callable[[Pool], int]
"""What may still be allocated in a pool now, reservations apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """``made_at`` is on the ledger's clock. ``is_held`` says whether its owner still knows of it."""

    kind: Kind
    pool: Pool
    size_bytes: int
    made_at: float
    share: str | None = None
    is_held: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckLedger:
    """Nothing could be reserved for ``streak_seconds``. ``dropped`` was nobody's; ``now`` is the ledger's clock."""

    streak_seconds: float
    held: tuple[Reservation, ...]
    dropped: tuple[Reservation, ...]
    now: float


class Ledger:
    """Thread-safe. ``headroom`` None means that only the limits of shares count.

    ``on_shortfall`` is told how many bytes a refused caller lacked, ``on_stuck`` when everybody
    was refused for long, at most once a minute; both must return at once.
    With ``unified`` memory both pools are one.
    """

    def __init__(
        self,
        headroom: Headroom | None = None,
        *,
        unified: bool = True,
        clock: Callable[[], float] = time.monotonic,
        on_shortfall: Callable[[int], None] = lambda _: None,
        on_stuck: Callable[[StuckLedger], None] = lambda _: None,
    ) -> None:
        self._headroom = headroom
        self._unified = unified
        self._clock = clock
        self._on_shortfall = on_shortfall
        self._on_stuck = on_stuck
        self._lock = threading.RLock()
        self._reservations: dict[str, Reservation] = {}
        self._shares: dict[str, Share] = {}
        self._audit = Audit()

    def reserve(
        self,
        key: str,
        size_bytes: int,
        kind: Kind,
        pool: Pool = "device",
        *,
        is_held: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Reserve ``size_bytes`` under ``key``; False if they do not fit now, or the key is taken, or for 0 and less."""
        entry = Reservation(
            kind=kind, pool=pool, size_bytes=size_bytes, made_at=self._clock(), is_held=is_held
        )
        return size_bytes > 0 and self._enter(key, entry)

    def claim_load(self, key: str, size_bytes: int, admits: Callable[[int], bool]) -> bool:
        """Reserve a model's weights if ``admits(outstanding bytes)``; nobody reserves between check and entry.

        A claim of 0 bytes is checked, but enters nothing; the same key again replaces its claim.
        """
        with self._lock:
            self._reservations.pop(key, None)
            if not admits(self.outstanding_bytes("device")):
                return False
            if size_bytes > 0:
                self._reservations[key] = Reservation(
                    kind="load",
                    pool="device",
                    size_bytes=size_bytes,
                    made_at=self._clock(),
                    is_held=lambda: True,
                )
            self._audit.worked()
            return True

    def reduce(self, key: str, size_bytes: int) -> None:
        """Make a reservation smaller; never grows, never fails."""
        with self._lock:
            entry = self._reservations.get(key)
            if entry is not None and size_bytes < entry.size_bytes:
                self._reservations[key] = replace(entry, size_bytes=max(0, size_bytes))
                self._audit.worked()

    def resize(self, key: str, size_bytes: int) -> bool:
        """Give a reservation another size; growing is refused like a reservation that does not fit."""
        with self._lock:
            entry = self._reservations.get(key)
            if entry is None or size_bytes <= 0:
                return False
            if size_bytes > entry.size_bytes and not self._fits(entry, size_bytes - entry.size_bytes):
                return False
            self._reservations[key] = replace(entry, size_bytes=size_bytes)
            return True

    def hold(self, key: str, size_bytes: int, pool: Pool = "device") -> bool:
        """Make what ``key`` holds of ``pool`` this large, 0 for nothing; False, and no change, if it cannot grow now.

        For a cache, which can do without: its kind is ``blocks``, and a refusal counts for nothing.
        """
        entry = Reservation(
            kind="blocks",
            pool=pool,
            size_bytes=max(0, size_bytes),
            made_at=self._clock(),
            is_held=lambda: True,
        )
        return self._hold(key, entry)

    def release(self, key: str) -> None:
        """Give back what ``key`` holds; nothing happens if it holds nothing."""
        with self._lock:
            if self._reservations.pop(key, None) is not None:
                self._audit.worked()

    def share(self, name: str, limit_bytes: int = 0) -> Share:
        """A part of the device's memory with a limit of its own, such as a model's KV grant."""
        with self._lock:
            if name in self._shares:
                raise ValueError(f"there is a share {name!r} already")
            share = self._shares[name] = Share(self, name, limit_bytes)
            return share

    def outstanding_bytes(self, pool: Pool) -> int:
        """Bytes that are reserved in ``pool`` but not allocated yet."""
        with self._lock:
            loose = sum(
                entry.size_bytes
                for entry in self._reservations.values()
                if entry.share is None and self._same(entry.pool, pool)
            )
            if not self._same("device", pool):
                return loose
            return loose + sum(share.outstanding_bytes for share in self._shares.values())

    def reservations(self) -> Mapping[str, Reservation]:
        """A copy of the table."""
        with self._lock:
            return MappingProxyType(dict(self._reservations))

    # --- inside, under the lock ----------------------------------------------------------

    def _enter(self, key: str, entry: Reservation) -> bool:
        with self._lock:
            if key in self._reservations or not self._fits(entry, entry.size_bytes):
                return False
            self._reservations[key] = entry
            self._audit.worked()
            return True

    def _hold(self, key: str, entry: Reservation) -> bool:
        """Make the reservation of ``key`` as large as ``entry``; a refusal is not told to anybody."""
        with self._lock:
            held = self._reservations.get(key)
            more = entry.size_bytes - (0 if held is None else held.size_bytes)
            if more > 0 and (self._is_over_limit(entry, more) or self._shortfall(entry, more) > 0):
                return False
            if entry.size_bytes > 0:
                self._reservations[key] = entry
            elif held is not None:
                del self._reservations[key]
            return True

    def _fits(self, entry: Reservation, more_bytes: int) -> bool:
        if self._is_over_limit(entry, more_bytes):
            self._refused()
            return False
        shortfall = self._shortfall(entry, more_bytes)
        if shortfall > 0:
            self._on_shortfall(shortfall)
            self._refused()
            return False
        return True

    def _is_over_limit(self, entry: Reservation, more_bytes: int) -> bool:
        """Whether the entry's share does not hold ``more_bytes`` more; one that is closed holds nothing."""
        if entry.share is None:
            return False
        share = self._shares.get(entry.share)
        return share is None or share.reserved_bytes + more_bytes > share.limit_bytes

    def _shortfall(self, entry: Reservation, more_bytes: int) -> int:
        """How many bytes the pool lacks for ``more_bytes``; 0 or less if it has them."""
        if self._headroom is None:
            return 0
        free = min(self._headroom(entry.pool), MOST_BYTES) - self.outstanding_bytes(entry.pool)
        return more_bytes - free

    def _same(self, one: Pool, other: Pool) -> bool:
        return self._unified or one == other

    def _refused(self) -> None:
        now = self._clock()
        streak = self._audit.failed(now)
        if streak is None:
            return
        lines = [
            f"{key}: {entry.kind}, {entry.size_bytes} bytes, {now - entry.made_at:.0f} s old"
            for key, entry in self._reservations.items()
        ]
        log.error("no memory could be reserved for %.0f s; held are: %s", streak, "; ".join(lines) or "none")
        dropped = []
        for key, entry in list(self._reservations.items()):
            if now - entry.made_at > STALE_SECONDS and not entry.is_held():
                log.warning("the reservation %s of %d bytes has no owner: dropped", key, entry.size_bytes)
                dropped.append(self._reservations.pop(key))
        held = tuple(self._reservations.values())
        self._on_stuck(StuckLedger(streak_seconds=streak, held=held, dropped=tuple(dropped), now=now))

    def _forget(self, share: Share) -> None:
        with self._lock:
            for key in [key for key, entry in self._reservations.items() if entry.share == share.name]:
                del self._reservations[key]
            self._shares.pop(share.name, None)


class Share:
    """A part of a ledger, with a limit. Made by ``Ledger.share``; thread-safe.

    ``allocated`` says how many of the reserved bytes are allocated already, ``knows``
    whether the owner of the share still knows of a key.
    """

    def __init__(self, ledger: Ledger, name: str, limit_bytes: int) -> None:
        self.name = name
        self.allocated: Callable[[], int] = lambda: 0
        self.knows: Callable[[str], bool] = lambda _: False
        self._ledger = ledger
        self._limit_bytes = max(0, limit_bytes)

    def reserve(self, key: str, size_bytes: int) -> bool:
        """Reserve ``size_bytes`` of KV under ``key``; False if they do not fit now, or the key is taken."""
        entry = Reservation(
            kind="kv",
            pool="device",
            size_bytes=size_bytes,
            made_at=self._ledger._clock(),
            share=self.name,
            is_held=lambda: self.knows(key),
        )
        return size_bytes >= 0 and self._ledger._enter(self._full(key), entry)

    def hold(self, key: str, size_bytes: int) -> bool:
        """Make what ``key`` holds this large, 0 for nothing; False, and no change, if it cannot grow now.

        For a cache, which can do without: its kind is ``blocks``, and a refusal counts for nothing.
        """
        entry = Reservation(
            kind="blocks",
            pool="device",
            size_bytes=max(0, size_bytes),
            made_at=self._ledger._clock(),
            share=self.name,
            is_held=lambda: True,
        )
        return self._ledger._hold(self._full(key), entry)

    def release(self, key: str) -> None:
        """Give back what ``key`` holds; nothing happens if it holds nothing."""
        self._ledger.release(self._full(key))

    def resize(self, limit_bytes: int) -> None:
        """Set the limit. Existing reservations stay; new ones succeed once they fit under it."""
        with self._ledger._lock:
            self._limit_bytes = max(0, limit_bytes)

    def close(self) -> None:
        """Drop the share and all that is reserved in it. Idempotent."""
        self._ledger._forget(self)

    @property
    def ledger(self) -> Ledger:
        """The ledger that this is a part of."""
        return self._ledger

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @property
    def reserved_bytes(self) -> int:
        return sum(self.reservations().values())

    @property
    def outstanding_bytes(self) -> int:
        """Bytes that are reserved but not allocated yet."""
        return max(0, self.reserved_bytes - self.allocated())

    def reservations(self) -> Mapping[str, int]:
        """A copy of this share's part of the table, by its own keys."""
        prefix = self._full("")
        return {
            key.removeprefix(prefix): entry.size_bytes
            for key, entry in self._ledger.reservations().items()
            if entry.share == self.name
        }

    def _full(self, key: str) -> str:
        return f"{self.name}/{key}"
