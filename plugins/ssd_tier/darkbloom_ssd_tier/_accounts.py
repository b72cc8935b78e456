"""What all processes on one cache share: bytes and files on disk, and how much was written in which hour.

Always true: in any 24 hours no more is charged than the budget, restarts and other
processes included; a write is charged before its first byte; nothing is charged back. If
the file is damaged, or cannot be had in time, nothing may be written.

The file ``accounts``, little-endian: magic (8 bytes), bytes on disk, files, milliseconds per
byte of reading (float64, 0 if unknown), then for each of 25 hours its number since 1970,
bytes written, and those of them for prompts seen once; at the end SHA-256 of all that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

FILE = "accounts"
HOURS = 25
HOUR_SECONDS = 3600
PATIENCE_SECONDS = 5.0
DENIED_BYTES = 1 << 60
"""Charged to the current hour of a damaged file: no budget is larger."""

_MAGIC = b"dbloomAC"
_HEAD = struct.Struct("<8sQQd")
_HOUR = struct.Struct("<QQQ")
_DIGEST_BYTES = 32
_UNCOUNTED = (1 << 64) - 1


class Busy(Exception):
    """Another process has the accounts for too long, or they cannot be written."""


@dataclass(slots=True)
class Hour:
    written_bytes: int = 0
    first_bytes: int = 0


@dataclass(slots=True)
class Book:
    """The accounts while they are locked; changes are written when the lock goes."""

    used_bytes: int = 0
    files: int = 0
    read_milliseconds_per_byte: float = 0.0
    hours: dict[int, Hour] = field(default_factory=dict)
    is_counted: bool = True
    """Whether bytes and files are known; else a scan of the folder must set them."""

    def written(self, now: float) -> Hour:
        """What was charged in the last 24 hours, and up to one more."""
        first = int(now // HOUR_SECONDS) - HOURS + 1
        counted = [hour for number, hour in self.hours.items() if number >= first]
        return Hour(sum(hour.written_bytes for hour in counted), sum(hour.first_bytes for hour in counted))

    def charge(self, now: float, size_bytes: int, *, is_first: bool) -> None:
        """``size_bytes`` are about to be written."""
        hour = self.hours.setdefault(int(now // HOUR_SECONDS), Hour())
        hour.written_bytes += size_bytes
        hour.first_bytes += size_bytes if is_first else 0

    def packed(self, now: float) -> bytes:
        current = int(now // HOUR_SECONDS)
        recent = sorted(number for number in self.hours if number > current - HOURS)[-HOURS:]
        used = max(0, self.used_bytes) if self.is_counted else _UNCOUNTED
        body = _HEAD.pack(_MAGIC, used, max(0, self.files), self.read_milliseconds_per_byte)
        for number in recent:
            hour = self.hours[number]
            body += _HOUR.pack(number, hour.written_bytes, hour.first_bytes)
        body = body.ljust(_HEAD.size + HOURS * _HOUR.size, b"\0")
        return body + hashlib.sha256(body).digest()

    @classmethod
    def unpacked(cls, content: bytes, now: float) -> Book:
        """The book; a new one for an empty file, one without any budget left for a damaged one."""
        current = int(now // HOUR_SECONDS)
        if not content:
            return cls(is_counted=False)
        body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if (
            len(body) != _HEAD.size + HOURS * _HOUR.size
            or hashlib.sha256(body).digest() != digest
            or body[:8] != _MAGIC
        ):
            return cls(hours={current: Hour(DENIED_BYTES, DENIED_BYTES)}, is_counted=False)
        _, used, files, rate = _HEAD.unpack_from(body)
        book = cls(0, 0, rate, is_counted=False) if used == _UNCOUNTED else cls(used, files, rate)
        for place in range(HOURS):
            number, written, first = _HOUR.unpack_from(body, _HEAD.size + place * _HOUR.size)
            if number:  # an hour to come was charged under a clock that was wrong; it counts from now on
                hour = book.hours.setdefault(min(number, current), Hour())
                hour.written_bytes += written
                hour.first_bytes += first
        return book


class Accounts:
    """The file in the root whose directory is ``handle``. Thread-safe."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._owed_bytes = 0
        self._owed_files = 0

    def owe(self, size_bytes: int) -> None:
        """A file of so many bytes is gone; the book hears it when it is opened next."""
        with self._lock:
            self._owed_bytes += size_bytes
            self._owed_files += 1

    @contextlib.contextmanager
    def open(self, now: float, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[Book]:
        """The book, locked against all other processes and threads. Raises ``Busy``."""
        try:
            file = os.open(
                FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._handle
            )
        except OSError as fault:
            raise Busy(f"{FILE} cannot be opened: {fault.strerror}") from fault
        try:
            self._wait(file, patience_seconds)
            try:
                book = Book.unpacked(os.pread(file, 65536, 0), now)
            except OSError as fault:
                raise Busy(f"{FILE} cannot be read: {fault.strerror}") from fault
            with self._lock:
                owed_bytes, self._owed_bytes = self._owed_bytes, 0
                owed_files, self._owed_files = self._owed_files, 0
            book.used_bytes -= owed_bytes
            book.files -= owed_files
            try:
                yield book
            finally:
                self._write(file, book.packed(now))
        finally:
            os.close(file)

    def peek(self, now: float) -> Book:
        """The book as it is, unlocked and not to be changed; an empty one if there is none."""
        try:
            file = os.open(FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._handle)
        except OSError:
            return Book(is_counted=False)
        with os.fdopen(file, "rb", buffering=0) as raw:
            return Book.unpacked(raw.read(65536), now)

    def _wait(self, file: int, patience_seconds: float) -> None:
        until = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as fault:
                if fault.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                    raise Busy(f"{FILE} cannot be locked: {fault.strerror}") from fault
            if time.monotonic() > until:
                raise Busy(f"another process has {FILE} for more than {patience_seconds:.0f} s")
            time.sleep(0.002)

    @staticmethod
    def _write(file: int, content: bytes) -> None:
        try:
            os.pwrite(file, content, 0)
        except OSError as fault:
            raise Busy(f"{FILE} cannot be written: {fault.strerror}") from fault
