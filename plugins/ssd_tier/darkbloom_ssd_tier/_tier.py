"""The tier of one model, and what opens it.

Always true: names and contents leave this process only as keyed names and ciphertext; a part
that does not authenticate is removed, counted and never given out; calls return at once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from darkbloom_core.contracts import (
    Fetch,
    PartKey,
    PartsFetched,
    PartsWritten,
    TierContext,
    TierStats,
)
from darkbloom_ssd_tier._folder import reading
from darkbloom_ssd_tier._format import SUFFIX, Damaged, Stopped, plain_bytes, read_part
from darkbloom_ssd_tier._index import Entry
from darkbloom_ssd_tier._name import NAME
from darkbloom_ssd_tier._options import read_options
from darkbloom_ssd_tier._reader import Reading
from darkbloom_ssd_tier._retention import REASONS
from darkbloom_ssd_tier._store import Store, Stores
from darkbloom_ssd_tier._writer import Account, Run

log = logging.getLogger("darkbloom.ssd-tier")

_STORES = Stores()
"""Models of one process share a folder, so they share what watches over it."""


class SsdTierFactory:
    """Opens the tier of a model. ``stores`` are those of the process, unless a test has its own."""

    name = NAME

    def __init__(self, stores: Stores = _STORES) -> None:
        self._stores = stores

    def open(self, context: TierContext) -> SsdTier:
        """Raises ``SetupError`` if options, folder or key are not as they must be."""
        options = read_options(context.options)
        path = options.directory or context.directory
        store = self._stores.take(path, options, context.bytes_limit, os.environ)
        try:
            return SsdTier(store, context, lambda: self._stores.give_back(store))
        except BaseException:
            self._stores.give_back(store)
            raise


class SsdTier:
    """A ``CacheTier``. ``release`` is called when it has closed."""

    def __init__(self, store: Store, context: TierContext, release: Callable[[], None]) -> None:
        self._store = store
        self._model = context.model
        self._emitter = context.emitter
        self._release = release
        self._home = store.open_model(context.model)
        self._account = Account(self._home, context.reserve, self._wrote, store.options.queue_bytes)
        self._lock = threading.Lock()
        self._is_closed = False
        self._hits = self._misses = self._offered = self._damaged = self._errors = 0

    # --- CacheTier --------------------------------------------------------------------------

    def probe(self, keys: Sequence[PartKey]) -> Sequence[int | None]:
        if self._is_closed or not self._store.is_scanned.is_set():
            return [None] * len(keys)
        names = self._names(keys)
        entries = self._store.index.find(self._home.name, [_file(name) for name in names])
        return [
            self._waiting_bytes(name) if entry is None else entry.part_bytes
            for name, entry in zip(names, entries, strict=True)
        ]

    def fetch(self, fetches: Sequence[Fetch]) -> Future[Sequence[bool]]:
        entries = self._store.index.find(
            self._home.name, [_file(name) for name in self._names([one.key for one in fetches])]
        )

        def on_read(reading: Reading) -> None:
            self._store.index.use([entry for entry in entries if entry is not None], self._store.clock())
            self._fetched(reading)

        return self._store.readers.fetch(fetches, self._read, on_read)

    def offer(self, key: PartKey, data: memoryview) -> bool:
        store, now = self._store, self._store.clock()
        name, data = self._name(key), data.cast("B")
        with self._lock:
            self._offered += 1
        (entry,) = store.index.find(self._home.name, [_file(name)])
        if entry is not None:
            store.index.use([entry], now)
            return True
        sight = store.sights.sight(name, now)
        drop = "closed" if self._is_closed or not len(data) else store.may_write(self._home, len(data), sight)
        if drop is not None:
            return store.writer.refuse(self._account, drop)
        return store.writer.offer(self._account, name, data, sight)

    def used(self, keys: Sequence[PartKey]) -> Sequence[bool]:
        store, now = self._store, self._store.clock()
        names = self._names(keys)
        entries = store.index.find(self._home.name, [_file(name) for name in names])
        store.index.use([entry for entry in entries if entry is not None], now)
        return [
            self._wants(name, now) if entry is None else False
            for name, entry in zip(names, entries, strict=True)
        ]

    def forget(self, keys: Sequence[PartKey]) -> None:
        for name in self._names(keys):
            self._store.writer.forget(self._account, name)
            (entry,) = self._store.index.find(self._home.name, [_file(name)])
            if entry is not None and self._home.is_owned:
                self._store.index.remove(entry.key)
                self._store.readers.submit(partial(self._store.retention.drop, entry, "forgotten"))

    def stats(self) -> TierStats:
        store, totals = self._store, self._store.index.totals(self._home.name)
        whole = store.index.totals()
        removed = {reason: store.retention.removed(self._home.name, reason) for reason in REASONS}
        dropped = dict(self._account.dropped)
        with self._lock:
            return TierStats(
                parts=totals.files,
                bytes_used=totals.part_bytes,
                bytes_limit=store.retention.limits.disk_bytes,
                hits=self._hits,
                misses=self._misses,
                offered=self._offered,
                dropped=sum(dropped.values()),
                evicted=removed["limit"] + removed["space"] + removed["age"],
                damaged=self._damaged,
                read_milliseconds_per_byte=store.read_milliseconds_per_byte,
                detail={
                    "disk_bytes_of_all_models": whole.disk_bytes,
                    "files_of_all_models": whole.files,
                    "waiting_bytes": self._account.waiting_bytes,
                    "read_errors": self._errors,
                    **{f"dropped_{drop}": count for drop, count in dropped.items()},
                    **{f"removed_{reason.replace(' ', '_')}": count for reason, count in removed.items()},
                },
            )

    def close(self) -> None:
        """Write what waits, for some seconds at most, and let go of the folder. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._store.leave_model(self._account)
        self._account.reserve(0)
        self._release()

    # --- inside -----------------------------------------------------------------------------

    def settle(self, seconds: float = 30.0) -> bool:
        """Wait for scans that are due and for all that waits to be written; False if it takes longer."""
        return self._store.settle(seconds)

    def _name(self, key: PartKey) -> bytes:
        return self._store.keys.part_name(key.block, key.part)

    def _names(self, keys: Sequence[PartKey]) -> list[bytes]:
        return [self._name(key) for key in keys]

    def _waiting_bytes(self, name: bytes) -> int | None:
        found = self._store.writer.find(self._account, name)
        return None if found is None else len(found)

    def _wants(self, name: bytes, now: float) -> bool:
        """Whether a part that is not on disk would be taken now; its prompt is seen by this."""
        sight = self._store.sights.see(name, now)
        if self._is_closed or self._waiting_bytes(name) is not None:
            return False
        return self._store.may_write(self._home, 1, sight) is None

    def _read(self, fetch: Fetch, is_stopped: Callable[[], bool]) -> bool:
        """Fill the buffer; whatever is wrong with the file only costs this part."""
        name, buffer = self._name(fetch.key), fetch.buffer.cast("B")
        found = self._store.writer.find(self._account, name)
        if found is not None and len(found) == len(buffer):
            buffer[:] = found
            return True
        (entry,) = self._store.index.find(self._home.name, [_file(name)])
        if entry is None:
            return False
        try:
            with self._home.used() as handle, reading(handle, _file(name)) as (read, size):
                if plain_bytes(size) != entry.part_bytes:
                    raise Damaged("its length is another one than it was")
                if len(buffer) != entry.part_bytes:
                    return False
                read_part(self._store.keys, name, read, buffer, is_stopped)
                return True
        except (Damaged, IsADirectoryError) as fault:
            self._remove_damaged(entry, str(fault))
        except FileNotFoundError:
            self._store.index.remove(entry.key)
        except Stopped:
            pass
        except Exception as fault:  # too many open files and the like say nothing about the file
            with self._lock:
                self._errors += 1
            log.warning("a part could not be read: %s", fault)
        return False

    def _remove_damaged(self, entry: Entry, fault: str) -> None:
        with self._lock:
            self._damaged += 1
        log.warning("a part of %s on disk is not what was written and is removed: %s", self._model, fault)
        self._store.index.remove(entry.key)
        if self._home.is_owned:
            self._store.retention.drop(entry, "damaged")

    def _fetched(self, reading: Reading) -> None:
        with self._lock:
            self._hits += reading.parts - reading.parts_missing
            self._misses += reading.parts_missing
        self._store.measured(reading.size_bytes, reading.seconds)
        self._emitter.emit(
            PartsFetched(
                model=self._model,
                tier=NAME,
                started_unix_nanoseconds=reading.began_unix_nanoseconds,
                duration_seconds=reading.seconds,
                parts=reading.parts,
                parts_missing=reading.parts_missing,
                size_bytes=reading.size_bytes,
            )
        )

    def _wrote(self, run: Run) -> None:
        self._emitter.emit(
            PartsWritten(
                model=self._model,
                tier=NAME,
                started_unix_nanoseconds=run.began_unix_nanoseconds,
                duration_seconds=run.ended_at - run.began_at,
                parts=run.parts,
                parts_dropped=run.dropped,
                size_bytes=run.size_bytes,
            )
        )


def _file(name: bytes) -> str:
    return name.hex() + SUFFIX
