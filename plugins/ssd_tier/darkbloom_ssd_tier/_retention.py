"""What goes, and why: room for a newcomer, the disk's free space, age, and what a scan finds wrong.

Always true: after room was made the newcomer fits the limits; whatever is removed is counted
by its reason and told in the log; the book says what the disk holds.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from darkbloom_core.errors import SetupError
from darkbloom_ssd_tier._accounts import Accounts, Book
from darkbloom_ssd_tier._folder import Folder, disk_bytes, modified_at, remove, scan
from darkbloom_ssd_tier._format import plain_bytes
from darkbloom_ssd_tier._index import Entry, Index

log = logging.getLogger("darkbloom.ssd-tier")

Reason: TypeAlias = Literal["limit", "space", "age", "damaged", "left behind", "forgotten"]

STALE_SECONDS = 3600.0
"""No write takes that long."""

PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Faults of a folder that say nothing about the folder: it can soon be read."""

REASONS: dict[Reason, str] = {
    "limit": "used longest ago, and the cache is full",
    "space": "used longest ago, and the disk is nearly full",
    "age": "not used for too long",
    "damaged": "not what was written there",
    "left behind": "a write that was interrupted",
    "forgotten": "no longer wanted",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of all models together, in bytes on disk, files, and seconds since the last use."""

    disk_bytes: int
    files: int
    ttl_seconds: float
    free_bytes_floor: int


class Retention:
    """Over one root. ``owned`` are the model folders whose lock this process has."""

    def __init__(self, folder: Folder, index: Index, accounts: Accounts, limits: Limits) -> None:
        self._folder = folder
        self._index = index
        self._accounts = accounts
        self.limits = limits
        self.owned: set[str] = set()
        self._lock = threading.Lock()
        self._removed: dict[str, Counter[Reason]] = {}
        self._untold: Counter[Reason] = Counter()
        self._untold_bytes: Counter[Reason] = Counter()

    def removed(self, folder: str, reason: Reason) -> int:
        """How many files of a model's folder were removed for this reason."""
        with self._lock:
            return self._removed.get(folder, Counter())[reason]

    def has_room(self, book: Book, size_bytes: int) -> bool:
        """Whether a file of ``size_bytes`` fits, after what must go for it has gone."""
        needed = disk_bytes(size_bytes)
        return needed <= self.limits.disk_bytes and self._make_room(book, needed, files=1)

    def has_space(self, size_bytes: int) -> bool:
        """Whether the disk has its free space also after ``size_bytes`` more."""
        free, _ = self._folder.free_bytes()
        return free - size_bytes >= self.limits.free_bytes_floor

    def sweep(self, book: Book, now: float) -> None:
        """What is too old goes; then what must go for the limits and for the disk's free space."""
        while (oldest := self._index.oldest()) is not None and now - oldest.used_at > self.limits.ttl_seconds:
            if not self._was_used_elsewhere(oldest):
                self._drop(oldest, "age", book)
        self._make_room(book, 0, files=0)
        while not self.has_space(0) and self._drop_oldest(book, "space"):
            pass

    def drop(self, entry: Entry, reason: Reason, book: Book | None = None) -> None:
        """Remove a file; without a book it hears of it when it is opened next."""
        self._drop(entry, reason, book)

    def recount(self, book: Book, now: float) -> bool:
        """Scan every folder: the index and the book say afterwards what is there. False if it is to be done again soon.

        What was known of a folder that cannot be read now stays known. Raises ``OSError`` if the root cannot be.
        """
        known = {entry.key: entry for entry in self._index.all()}
        models, is_whole = self._folder.models(), True
        book.used_bytes, book.files, book.is_counted = 0, 0, False
        for model in models:
            try:
                with self._folder.model(model) as handle:
                    self._recount_model(handle, model, known, book, now)
            except FileNotFoundError:
                continue
            except (OSError, SetupError) as fault:
                log.warning("the folder %s is left alone: %s", model, fault)
                is_whole = is_whole and getattr(fault, "errno", None) not in PASSING
                for key in [key for key in known if key[0] == model]:
                    book.used_bytes += known.pop(key).disk_bytes
                    book.files += 1
        for key in known:
            self._index.remove(key)
        book.is_counted = True
        return is_whole

    def tell(self) -> None:
        """Say in the log what was removed since, and why."""
        with self._lock:
            untold, sizes = self._untold, self._untold_bytes
            self._untold, self._untold_bytes = Counter(), Counter()
        for reason, count in untold.items():
            log.info("removed %d files, %d bytes: %s", count, sizes[reason], REASONS[reason])

    # --- inside ---------------------------------------------------------------------------

    def _make_room(self, book: Book, needed_bytes: int, files: int) -> bool:
        """Whether so much more fits; what was used longest ago goes for it."""
        limits = self.limits
        while book.used_bytes + needed_bytes > limits.disk_bytes or book.files + files > limits.files:
            if not self._drop_oldest(book, "limit"):
                return False
        return True

    def _recount_model(
        self, handle: int, model: str, known: dict[tuple[str, str], Entry], book: Book, now: float
    ) -> None:
        for found in scan(handle):
            part = plain_bytes(found.size_bytes) if found.kind == "part" else None
            is_wrong = found.kind == "wrong" or (
                found.kind == "part" and part is None and found.name.endswith(".v1")
            )
            is_ours = (
                model in self.owned
            )  # then whoever wrote there before is gone, and nobody else writes now
            is_stale = found.kind == "temporary" and (is_ours or now - found.modified_at > STALE_SECONDS)
            if is_stale or (is_ours and is_wrong):
                if remove(handle, found.name):
                    self._note(model, "damaged" if is_wrong else "left behind", found.size_bytes)
                    continue
                log.warning("%s in %s is in the way and cannot be removed", found.name, model)
            book.used_bytes += found.disk_bytes
            book.files += 1
            if found.kind != "part" or is_wrong:
                continue
            entry = known.pop((model, found.name), None)
            if entry is not None and entry.disk_bytes == found.disk_bytes:
                entry.noted_at = found.modified_at
                self._index.use([entry], min(found.modified_at, now))
            else:
                stamp = min(found.modified_at, now)
                self._index.add(Entry(model, found.name, part, found.disk_bytes, stamp, found.modified_at))

    def _drop_oldest(self, book: Book, reason: Reason) -> bool:
        while (oldest := self._index.oldest()) is not None:
            if not self._was_used_elsewhere(oldest):
                return self._drop(oldest, reason, book)
        return False

    def _was_used_elsewhere(self, entry: Entry) -> bool:
        """Whether another process used the file since we looked; it then has its place by that."""
        if entry.folder in self.owned:
            return False
        try:
            with self._folder.model(entry.folder) as handle:
                modified = modified_at(handle, entry.file)
        except (OSError, SetupError):
            return False
        if modified is None or modified <= entry.used_at:
            return False
        entry.noted_at = modified
        self._index.use([entry], modified)
        return True

    def _drop(self, entry: Entry, reason: Reason, book: Book | None) -> bool:
        self._index.remove(entry.key)
        try:
            with self._folder.model(entry.folder) as handle:
                is_removed = remove(handle, entry.file)
        except (OSError, SetupError) as fault:
            if isinstance(fault, OSError) and fault.errno == errno.EROFS:
                self._index.add(entry)
                raise
            log.warning("%s cannot be removed: %s", entry.file, fault)
            return True  # it is not known any more, so the next oldest has its turn
        if is_removed:
            if book is None:
                self._accounts.owe(entry.disk_bytes)
            else:
                book.used_bytes -= entry.disk_bytes
                book.files -= 1
            self._note(entry.folder, reason, entry.disk_bytes)
        return True

    def _note(self, model: str, reason: Reason, size_bytes: int) -> None:
        with self._lock:
            self._removed.setdefault(model, Counter())[reason] += 1
            self._untold[reason] += 1
            self._untold_bytes[reason] += size_bytes
