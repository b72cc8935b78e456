"""One cache folder in this process: its key, index, budget and threads, shared by the tiers of all models.

Always true: there is one store per folder and process, and it lives as long as a tier of it is
open; without a key there is none; each file is written once the book has room for it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from darkbloom_core.errors import SetupError
from darkbloom_ssd_tier._accounts import Accounts, Book, Busy, Hour
from darkbloom_ssd_tier._admission import DayBudget, Sight, Sights
from darkbloom_ssd_tier._folder import Folder, NewFile, disk_bytes, touch
from darkbloom_ssd_tier._format import SUFFIX, encrypt_part, file_bytes
from darkbloom_ssd_tier._home import Home
from darkbloom_ssd_tier._index import Entry, Index
from darkbloom_ssd_tier._keys import Keys
from darkbloom_ssd_tier._options import SsdOptions
from darkbloom_ssd_tier._reader import Readers
from darkbloom_ssd_tier._retention import Limits, Retention
from darkbloom_ssd_tier._stores import KeyStore, StoreName, chosen_store
from darkbloom_ssd_tier._writer import Account, Drop, Waiting, Writer

log = logging.getLogger("darkbloom.ssd-tier")

GIB = 1024**3
TICK_SECONDS = 60.0
RECOUNT_SECONDS = 600.0
PAUSE_SECONDS = 600.0
"""How long nothing is written after the disk was full or raised another error."""

TOUCH_SECONDS = 60.0
"""The disk's note of a part's last use is this much late at most, and a tick."""

SMOOTHING = 0.2

Clock = Callable[[], float]


def limits_of(options: SsdOptions, bytes_limit: int | None, disk_size: int) -> Limits:
    """The limits, with the defaults for a disk of this size."""
    wanted = options.bytes_limit if bytes_limit is None else bytes_limit
    floor = options.free_bytes_floor
    return Limits(
        disk_bytes=disk_size // 10 if wanted is None else wanted,
        files=options.files_limit,
        ttl_seconds=options.ttl_seconds,
        free_bytes_floor=min(20 * GIB, disk_size // 10) if floor is None else floor,
    )


def budget_of(options: SsdOptions, disk_size: int) -> DayBudget:
    """The day's bytes, with the default for a disk of this size."""
    per_day = disk_size // 10 if options.write_bytes_per_day is None else options.write_bytes_per_day
    return DayBudget(per_day, int(per_day * options.first_sight_share))


def key_store_of(
    folder: Folder, options: SsdOptions, environment: Mapping[str, str], *, ignores_note: bool = False
) -> KeyStore:
    """Where the key of the cache in ``folder`` is, or would be made. Raises ``SetupError``."""
    noted = None if ignores_note else (folder.read_about() or {}).get("key_store")
    key_file = options.key_file.expanduser().absolute()
    if key_file.parent.resolve().is_relative_to(folder.path.resolve()):
        raise SetupError(f"the key file {key_file} would lie in the cache's own folder {folder.path}")
    noted_store = cast(StoreName, noted) if noted in ("keyring", "file", "secret", "environment") else None
    return chosen_store(options.key_store, key_file, options.key_variable, environment, noted_store)


class Store:
    """Opened by ``Stores``. ``clock`` gives seconds since 1970."""

    def __init__(
        self,
        folder: Folder,
        options: SsdOptions,
        bytes_limit: int | None,
        environment: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self.folder = folder
        self.options = options
        self.clock = clock
        self.keys = self._open_key(environment)
        _, disk_size = folder.free_bytes()
        self.index = Index()
        self.accounts = Accounts(folder.handle)
        self.retention = Retention(
            folder, self.index, self.accounts, limits_of(options, bytes_limit, disk_size)
        )
        self.budget = budget_of(options, disk_size)
        self.sights = Sights(options.second_sight_seconds)
        self.is_scanned = threading.Event()
        found = self.accounts.peek(clock())
        self.read_milliseconds_per_byte: float | None = found.read_milliseconds_per_byte or None
        self._rate_lock = threading.Lock()
        self._spent = Hour()
        self._paused_until = 0.0
        self._writing = threading.Lock()  # no recount sees a file that is half in, half out
        self._homes: dict[str, Home] = {}
        self._is_due = False
        self._is_keeping = True
        self._recounted_at = 0.0
        self._wake = threading.Condition()
        self._is_closed = False
        self.writer = Writer(self.write, options.write_bytes_per_second)
        self.readers = Readers(options.readers)
        self._keeper = threading.Thread(target=self._keep, name="ssd tier keeper", daemon=True)
        self._keeper.start()

    # --- models ---------------------------------------------------------------------------

    def open_model(self, model: str) -> Home:
        """Join with a model's folder. Whoever has its lock writes; others only read."""
        name = self.keys.folder_name(model)
        with self._wake:
            home = self._homes.get(name)
            if home is None:
                try:
                    handle = self.folder.open_model(name, create=self.folder.is_writable)
                except OSError as fault:
                    where = self.folder.path / name
                    raise SetupError(f"the folder {where} cannot be used: {fault.strerror}") from fault
                home = self._homes[name] = Home(name, handle)
            home.tiers += 1
            is_owned = self._own(home)
            self._is_due = True
            self._wake.notify_all()
        if not is_owned:
            log.warning("another process writes the cache of %s, or nobody can: this one only reads", model)
        return home

    def leave_model(self, account: Account) -> None:
        """Write what waits, and let the folder go."""
        self.writer.leave(account)
        home = account.home
        with self._writing, self._wake:
            home.tiers -= 1
            if home.tiers == 0:
                self.retention.owned.discard(home.name)
                del self._homes[home.name]
                home.close()

    def _own(self, home: Home) -> bool:
        if not self.folder.is_writable or not home.own():
            return False
        self.retention.owned.add(home.name)
        return True

    # --- writing ----------------------------------------------------------------------------

    def may_write(self, home: Home, size_bytes: int, sight: Sight) -> Drop | None:
        """Why a part need not even wait, or None. Memory only."""
        if not home.is_owned or not self.is_scanned.is_set():
            return "closed"
        if self.clock() < self._paused_until:
            return "pause"
        if disk_bytes(file_bytes(size_bytes)) > self.retention.limits.disk_bytes:
            return "room"
        spent, waiting = self._spent, self.writer.uncharged()
        spent = Hour(spent.written_bytes + waiting.written_bytes, spent.first_bytes + waiting.first_bytes)
        is_allowed = self.budget.allows(spent, file_bytes(size_bytes), sight)
        return None if is_allowed else "budget"

    def write(self, waiting: Waiting) -> Drop | None:
        """Put a part on disk. The book is charged first; whatever goes wrong afterwards is not charged back."""
        now, size = self.clock(), file_bytes(len(waiting.data))
        if now < self._paused_until:
            return "pause"
        home, name = waiting.account.home, waiting.name.hex() + SUFFIX
        if self.index.find(home.name, [name]) != [None]:
            return None
        with self._writing, home.used() as handle:
            file: NewFile | None = None
            try:
                with self.accounts.open(now) as book:
                    drop = self._refused(book, now, size, waiting)
                    if drop is not None:
                        return drop
                    book.charge(now, size, is_first=waiting.sight == "first")
                    book.used_bytes += disk_bytes(size)
                    book.files += 1
                    self.writer.charged(waiting)
                    self._spent = book.written(now)
                    file = NewFile(handle, size)
                file.write(encrypt_part(self.keys, waiting.name, memoryview(waiting.data)))
                file.keep(name, now, fsync=self.options.fsync)
            except (OSError, Busy) as fault:
                self._failed(fault, now)
                if file is not None:
                    file.abandon()
                    self.accounts.owe(disk_bytes(size))
                return "error"
            self.index.add(Entry(home.name, name, len(waiting.data), disk_bytes(size), now, now))
        return None

    def _refused(self, book: Book, now: float, size: int, waiting: Waiting) -> Drop | None:
        self._spent = book.written(now)
        if not book.is_counted:
            return "closed"
        if not self.budget.allows(self._spent, size, waiting.sight):
            return "budget"
        if not self.retention.has_space(size):
            return "space"
        return None if self.retention.has_room(book, size) else "room"

    def _failed(self, fault: OSError | Busy, now: float) -> None:
        if isinstance(fault, OSError):
            self._paused_until = now + PAUSE_SECONDS
            is_full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if is_full else str(fault)
            log.warning("nothing is written to %s for %.0f s: %s", self.folder.path, PAUSE_SECONDS, reason)
        else:
            log.warning("a part was not written to %s: %s", self.folder.path, fault)

    # --- reading ----------------------------------------------------------------------------

    def measured(self, size_bytes: int, seconds: float) -> None:
        """So many bytes came in this time."""
        if size_bytes <= 0:
            return
        rate = seconds * 1000 / size_bytes
        with self._rate_lock:
            known = self.read_milliseconds_per_byte
            self.read_milliseconds_per_byte = rate if known is None else known + SMOOTHING * (rate - known)

    # --- the keeper -------------------------------------------------------------------------

    def keep_house(self) -> None:
        """What a tick does: locks that became free, a scan if it is time, what must go, notes of last uses."""
        now = self.clock()
        with self._wake:
            is_due, self._is_due = self._is_due, False
            others = [home for home in self._homes.values() if not home.is_owned]
            taken_over = [home for home in others if self._own(home)]
        for home in taken_over:
            log.info("the folder %s is written by this process from now on", home.name)
        try:
            if taken_over or is_due or not 0 <= now - self._recounted_at < RECOUNT_SECONDS:
                self.recount(now)
            with self._writing, self.accounts.open(now) as book:
                self.retention.sweep(book, now)
                self._spent = book.written(now)
                self._share_rate(book)
        except (OSError, Busy) as fault:
            log.warning("the cache in %s could not be looked after: %s", self.folder.path, fault)
        self.retention.tell()
        self._note_uses()

    def settle(self, seconds: float) -> bool:
        """Wait until the folder is scanned and looked after and nothing waits; False if it takes longer."""
        until = time.monotonic() + seconds
        with self._wake:
            is_kept = self._wake.wait_for(
                lambda: self._recounted_at > 0 and not self._is_due and not self._is_keeping, seconds
            )
        return is_kept and self.writer.settle(max(0.0, until - time.monotonic()))

    def recount(self, now: float) -> None:
        """Scan the folder. One that fails is due again."""
        with self._writing:
            self._recounted_at = 0.0
            if self.folder.is_writable:
                with self.accounts.open(now) as book:
                    is_whole = self.retention.recount(book, now)
                    self._spent = book.written(now)
            else:
                is_whole = self.retention.recount(Book(), now)
            if is_whole:
                self._recounted_at = now
            self.is_scanned.set()

    def _share_rate(self, book: Book) -> None:
        with self._rate_lock:
            if self.read_milliseconds_per_byte is not None:
                book.read_milliseconds_per_byte = self.read_milliseconds_per_byte

    def _note_uses(self) -> None:
        late: dict[str, list[Entry]] = {}
        for entry in self.index.all():
            if entry.used_at - entry.noted_at > TOUCH_SECONDS:
                late.setdefault(entry.folder, []).append(entry)
        for model, entries in late.items():
            try:
                with self.folder.model(model) as handle:
                    for entry in entries:
                        stamp = entry.used_at
                        touch(handle, entry.file, stamp)
                        entry.noted_at = stamp
            except (OSError, SetupError) as fault:
                log.debug("uses could not be noted in %s: %s", model, fault)

    def _keep(self) -> None:
        while True:
            try:
                self.keep_house()
            except Exception:  # the thread must outlive a fault, or nothing would be cleaned up any more
                log.exception("the cache in %s could not be looked after", self.folder.path)
            with self._wake:
                self._is_keeping = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._is_closed or self._is_due, TICK_SECONDS)
                if self._is_closed:
                    return
                self._is_keeping = True

    def close(self) -> None:
        """End the threads; what is on disk stays."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        self.readers.close()
        self.writer.close()
        self._keeper.join()
        try:
            self._note_uses()
            with self.accounts.open(self.clock(), patience_seconds=0.5) as book:
                self._share_rate(book)
        except (OSError, Busy) as fault:
            log.debug("the last notes of the cache in %s are lost: %s", self.folder.path, fault)
        self.folder.close()

    def _open_key(self, environment: Mapping[str, str]) -> Keys:
        store = key_store_of(self.folder, self.options, environment)
        secret = store.load()
        if secret is None:
            secret = store.create()
        keys = Keys.derived(secret)
        about = {"key_store": store.name, "key_id": keys.key_id.hex()}
        known = self.folder.read_about()
        if known is not None and known.get("key_id") not in (None, about["key_id"]):
            log.warning(
                "the key of %s is another than before: what was kept cannot be read and will age out",
                self.folder.path,
            )
        if self.folder.is_writable and (known is None or about.items() - known.items()):
            try:
                self.folder.write_about(about)
            except OSError as fault:
                raise SetupError(f"{self.folder.path} cannot be written: {fault.strerror}") from fault
        return keys


class Stores:
    """The stores of this process, by folder; the first tier that opens one decides its options."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], tuple[Store, int]] = {}

    def take(
        self, path: Path, options: SsdOptions, bytes_limit: int | None, environment: Mapping[str, str]
    ) -> Store:
        """The store of ``path``. Raises ``SetupError`` if it cannot be had; each ``take`` has its ``give_back``."""
        with self._lock:
            folder = Folder.open(path)
            try:
                found = os.fstat(folder.handle)
                key = (found.st_dev, found.st_ino)
                store, users = self._open.get(key, (None, 0))
                if store is None:
                    store = Store(folder, options, bytes_limit, environment, self._clock)
                else:
                    folder.close()
                    if store.options != options:
                        log.warning("%s is open with other options, which stay until it is closed", path)
            except BaseException:
                folder.close()
                raise
            self._open[key] = (store, users + 1)
            return store

    def give_back(self, store: Store) -> None:
        """Close the store after its last user."""
        with self._lock:
            key, users = next((key, users) for key, (each, users) in self._open.items() if each is store)
            if users > 1:
                self._open[key] = (store, users - 1)
                return
            del self._open[key]
            store.close()
