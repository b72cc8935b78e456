"""The cache's folder, and every file operation in it.

Always true: what is opened is opened below a directory that is held open, never through a
symbolic link, and belongs to this user; folders are 0700, files 0600; a part's file appears
whole, by a rename; only files whose names are of our pattern are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from darkbloom_core.errors import SetupError
from darkbloom_ssd_tier._format import Damaged, Read

ABOUT = "about.json"
ABOUT_FORMAT = "darkbloom ssd tier 1"
TAG_FILE = "CACHEDIR.TAG"
TAG_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n# A cache of darkbloom: backups may leave it out.\n"
LOCK = "lock"
UNIT_BYTES = 4096
"""What a file takes on disk is a multiple of this."""

FOLDER_PATTERN = re.compile(r"[0-9a-f]{32}")
PART_PATTERN = re.compile(r"[0-9a-f]{64}\.v[0-9]{1,4}")
TEMP_PATTERN = re.compile(r"\.tmp-[0-9a-f]{32}")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Found:
    """An entry of a model's folder. ``disk_bytes`` is what it takes; ``kind`` "strange" is left alone."""

    name: str
    kind: Literal["part", "temporary", "wrong", "strange"]
    size_bytes: int
    disk_bytes: int
    modified_at: float


def disk_bytes(size_bytes: int) -> int:
    """What a file of this length takes on disk."""
    return -(-size_bytes // UNIT_BYTES) * UNIT_BYTES


class Folder:
    """The root of the cache, held open. Model folders below it are named by 32 hexadecimal digits."""

    def __init__(self, path: Path, handle: int, *, is_writable: bool) -> None:
        self.path = path
        self.handle = handle
        self.is_writable = is_writable

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Folder:
        """Open the root, and make it if ``create``.

        Raises ``SetupError`` for a folder that is not a cache of this user's, or ``FileNotFoundError``.
        """
        path = path.expanduser().absolute()
        try:
            if create:
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            parent = path.parent.resolve(strict=True)
            handle = os.open(parent / path.name, _DIRECTORY)
        except FileNotFoundError:
            if create:
                raise SetupError(f"{path} cannot be made") from None
            raise
        except OSError as fault:
            raise SetupError(f"{path} cannot be a cache: {fault.strerror}") from fault
        try:
            _check_ancestors(parent)
            _check_directory(handle, path)
            folder = cls(
                path, handle, is_writable=os.access(".", os.W_OK, dir_fd=handle) and not _is_read_only(handle)
            )
            folder._check_ours()
        except BaseException:
            os.close(handle)
            raise
        return folder

    def close(self) -> None:
        """Close the directory."""
        os.close(self.handle)

    # --- the root -----------------------------------------------------------------------

    def read_about(self) -> dict[str, str] | None:
        """What is written down about the cache, None if nothing is."""
        try:
            with os.fdopen(os.open(ABOUT, _READ, dir_fd=self.handle), "rb") as file:
                about = json.loads(file.read(65536))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as fault:
            raise SetupError(
                f"{self.path / ABOUT} cannot be read: {fault}; `darkbloom ssd wipe` begins anew"
            ) from fault
        if not isinstance(about, dict) or about.get("format") != ABOUT_FORMAT:
            raise SetupError(f"{self.path} is a cache of another format; `darkbloom ssd wipe` begins anew")
        return {str(name): str(value) for name, value in about.items()}

    def write_about(self, about: dict[str, str]) -> None:
        """Write down what the cache is, replacing what was there."""
        self._replace(ABOUT, json.dumps({"format": ABOUT_FORMAT, **about}, indent=1).encode() + b"\n")
        if not self._has(TAG_FILE):
            self._replace(TAG_FILE, TAG_TEXT)

    def models(self) -> list[str]:
        """The names of the model folders."""
        with os.scandir(self.handle) as entries:
            return sorted(
                entry.name
                for entry in entries
                if FOLDER_PATTERN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )

    def free_bytes(self) -> tuple[int, int]:
        """Bytes that may still be written on this disk, and its size."""
        found = os.fstatvfs(self.handle)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def _check_ours(self) -> None:
        """A folder that is neither empty nor marked as a cache is somebody's data."""
        names = _names(self.handle)
        is_ours = any(name in (ABOUT, TAG_FILE) or FOLDER_PATTERN.fullmatch(name) for name in names)
        if names and not is_ours:
            raise SetupError(f"{self.path} is not empty and no cache: name another folder, or empty this one")

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _replace(self, name: str, content: bytes) -> None:
        temporary = f".tmp-{secrets.token_hex(16)}"
        with os.fdopen(os.open(temporary, _NEW, 0o600, dir_fd=self.handle), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, name, src_dir_fd=self.handle, dst_dir_fd=self.handle)

    # --- model folders ------------------------------------------------------------------

    def open_model(self, name: str, *, create: bool = False) -> int:
        """A handle of a model's folder. Raises ``OSError``, or ``SetupError`` if it is not ours."""
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.handle)
        handle = os.open(name, _DIRECTORY, dir_fd=self.handle)
        try:
            _check_directory(handle, self.path / name)
        except BaseException:
            os.close(handle)
            raise
        return handle

    @contextlib.contextmanager
    def model(self, name: str) -> Iterator[int]:
        """``open_model`` for a while."""
        handle = self.open_model(name)
        try:
            yield handle
        finally:
            os.close(handle)

    def remove_model(self, name: str) -> bool:
        """Remove a model's folder if nothing but its lock is in it."""
        try:
            with self.model(name) as handle:
                if _names(handle) - {LOCK}:
                    return False
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(LOCK, dir_fd=handle)
            os.rmdir(name, dir_fd=self.handle)
        except (OSError, SetupError):
            return False
        return True


def scan(handle: int) -> Iterator[Found]:
    """What is in a model's folder, its lock left out."""
    user = os.geteuid()
    with os.scandir(handle) as entries:
        for entry in entries:
            if entry.name == LOCK:
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            is_file = stat.S_ISREG(found.st_mode) and found.st_uid == user
            kind: Literal["part", "temporary", "wrong", "strange"] = "strange"
            if PART_PATTERN.fullmatch(entry.name):
                kind = "part" if is_file else "wrong"
            elif TEMP_PATTERN.fullmatch(entry.name) and is_file:
                kind = "temporary"
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            yield Found(entry.name, kind, size, disk_bytes(size), found.st_mtime)


def modified_at(handle: int, name: str) -> float | None:
    """When a file was used last, as the disk knows it; None if it is gone."""
    try:
        return os.stat(name, dir_fd=handle, follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return None


def remove(handle: int, name: str) -> bool:
    """Remove a file of ours, or what stands in its place unless that is a directory with something in it."""
    if not (PART_PATTERN.fullmatch(name) or TEMP_PATTERN.fullmatch(name)):
        raise ValueError(f"{name!r} is not a name of ours")
    try:
        os.unlink(name, dir_fd=handle)
    except FileNotFoundError:
        return False
    except (IsADirectoryError, PermissionError):  # Linux says the one of a directory, macOS the other
        try:
            os.rmdir(name, dir_fd=handle)
        except OSError:
            return False
    return True


class NewFile:
    """A part's file before it counts. Its whole length is there at once, so every recount sees it."""

    def __init__(self, handle: int, size_bytes: int) -> None:
        self._folder = handle
        self._name = f".tmp-{secrets.token_hex(16)}"
        self._file = os.open(self._name, _NEW, 0o600, dir_fd=handle)
        try:
            os.ftruncate(self._file, size_bytes)
        except BaseException:
            self.abandon()
            raise

    def write(self, pieces: Iterable[memoryview]) -> None:
        """Write all of it, from the beginning."""
        for piece in pieces:
            while piece:
                piece = piece[os.write(self._file, piece) :]

    def keep(self, name: str, used_at: float, *, fsync: bool) -> None:
        """Let it count, under ``name``."""
        os.utime(self._file, (used_at, used_at))
        if fsync:
            os.fsync(self._file)
        os.rename(self._name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.close(self._file)
        if fsync:
            os.fsync(self._folder)

    def abandon(self) -> None:
        """Remove it."""
        os.close(self._file)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)


@contextlib.contextmanager
def reading(handle: int, name: str) -> Iterator[tuple[Read, int]]:
    """A part's file to read from its beginning, and its length.

    Raises ``Damaged`` if it is no file of ours, ``FileNotFoundError``, and other ``OSError``.
    """
    try:
        file = os.open(name, _READ, dir_fd=handle)
    except OSError as fault:
        if fault.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise Damaged("it is no file") from fault
        raise
    with os.fdopen(file, "rb", buffering=0) as raw:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise Damaged("it is no file of this user")
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)

        def read(view: memoryview) -> int | None:
            try:
                return raw.readinto(view)
            except OSError as fault:
                if fault.errno == errno.EIO:
                    raise Damaged("the disk cannot read it") from fault
                raise

        yield read, found.st_size


def touch(handle: int, name: str, used_at: float) -> None:
    """Note on disk when a part was used last."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(name, (used_at, used_at), dir_fd=handle, follow_symlinks=False)


def _check_directory(handle: int, path: Path) -> None:
    found = os.fstat(handle)
    if found.st_uid != os.geteuid():
        raise SetupError(f"{path} belongs to another user")
    if stat.S_IMODE(found.st_mode) != 0o700:
        try:
            os.fchmod(handle, 0o700)
        except OSError as fault:
            raise SetupError(
                f"others may enter {path}, and that cannot be changed: {fault.strerror}"
            ) from fault


def _check_ancestors(path: Path) -> None:
    """Nobody else may be able to put another folder in the place of ours."""
    for each in (path, *path.parents):
        found = each.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise SetupError(f"{each}, above the cache, belongs to another user")
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise SetupError(f"anybody may write to {each}, which is above the cache")


def _names(handle: int) -> set[str]:
    with os.scandir(handle) as entries:
        return {entry.name for entry in entries}


def _is_read_only(handle: int) -> bool:
    return bool(os.fstatvfs(handle).f_flag & os.ST_RDONLY)
