"""Where the installation's secret is kept: the system's keyring, a file of ours, or what an operator provides.

Always true: two processes that begin together have one secret; a secret that others could
read or have replaced is refused; nothing here ever writes a secret into the cache's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from darkbloom_core.errors import SetupError
from darkbloom_ssd_tier._keys import SECRET_BYTES

StoreName: TypeAlias = Literal["keyring", "file", "secret", "environment"]

SERVICE = "darkbloom ssd-tier"
ACCOUNT = "installation"
KEYRING_SECONDS = 10.0
"""A keyring that is locked may ask somebody who is not there; so long is it waited for."""


class KeyStore(Protocol):
    """One place for one secret of 32 bytes. All raise ``SetupError`` if the place cannot be used."""

    @property
    def name(self) -> StoreName: ...

    def load(self) -> bytes | None:
        """The secret, or None if there is none yet."""
        ...

    def create(self) -> bytes:
        """Make a secret unless there is one, in one step; gives the one that is there then."""
        ...

    def destroy(self) -> bool:
        """Destroy the secret; False if it is not ours to destroy."""
        ...


class FileStore:
    """A file that only its owner can read, 64 hexadecimal digits."""

    name: StoreName = "file"

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> bytes | None:
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise SetupError(f"the key file {self.path} cannot be read: {fault.strerror}") from fault
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise SetupError(f"the key file {self.path} is not a file of this user")
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise SetupError(
                    f"others may read the key file {self.path}: `chmod 600` it, or wipe the cache"
                )
            return _parsed(file.read(1024), f"the key file {self.path}")

    def create(self) -> bytes:
        made = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(secrets.token_hex(SECRET_BYTES).encode() + b"\n")
                    file.flush()
                    os.fsync(handle)
                with contextlib.suppress(FileExistsError):
                    os.link(made, self.path)  # whole, or not at all: who comes second takes the first one's
            finally:
                made.unlink()
        except OSError as fault:
            raise SetupError(f"the key file {self.path} cannot be made: {fault.strerror}") from fault
        found = self.load()
        if found is None:
            raise SetupError(f"the key file {self.path} was taken away at once")
        return found

    def destroy(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            length = self.path.lstat().st_size
            if self.path.is_file() and not self.path.is_symlink():
                with self.path.open("r+b") as file:
                    file.write(b"\0" * length)
                    file.flush()
                    os.fsync(file.fileno())
            self.path.unlink()
        return True


class KeyringStore:
    """The system's keyring. It has no "only if absent", so ``lock`` makes one process wait for another."""

    name: StoreName = "keyring"

    def __init__(self, lock: Path) -> None:
        self._lock = lock

    def load(self) -> bytes | None:
        text = _in_time(lambda: _keyring().get_password(SERVICE, ACCOUNT))
        return None if text is None else _parsed(text.encode(), "the keyring's entry")

    def create(self) -> bytes:
        with _locked(self._lock):
            found = self.load()
            if found is None:
                made = secrets.token_hex(SECRET_BYTES)
                _in_time(lambda: _keyring().set_password(SERVICE, ACCOUNT, made))
                found = self.load()
        if found is None:
            raise SetupError("the keyring did not keep the key")
        return found

    def destroy(self) -> bool:
        with _locked(self._lock):
            if self.load() is not None:
                _in_time(lambda: _keyring().delete_password(SERVICE, ACCOUNT))
        return True

    @staticmethod
    def is_usable() -> bool:
        """Whether there is a keyring that can keep a secret."""
        try:
            backend = _keyring().get_keyring()
            return float(backend.priority) >= 1
        except (ImportError, RuntimeError, TypeError, ValueError):  # how backends say that they are none
            return False


class ProvidedStore:
    """A secret that an operator provides, in a file or a variable. It is never made or destroyed here."""

    def __init__(self, name: StoreName, read: Callable[[], bytes], what: str) -> None:
        self.name: StoreName = name
        self._read = read
        self._what = what

    @classmethod
    def of_file(cls, path: Path) -> ProvidedStore:
        """What the file ``path`` holds, wherever a container platform links it to."""
        return cls("secret", lambda: path.read_bytes()[:1024], f"the secret file {path}")

    @classmethod
    def of_environment(cls, variable: str, environment: Mapping[str, str]) -> ProvidedStore:
        """What the variable holds."""
        return cls("environment", lambda: environment[variable].encode(), f"the variable {variable}")

    def load(self) -> bytes | None:
        try:
            text = self._read()
        except (OSError, KeyError) as fault:
            raise SetupError(f"{self._what} cannot be read, so nothing is kept on disk: {fault}") from fault
        return _parsed(text, self._what)

    def create(self) -> bytes:
        found = self.load()
        assert found is not None  # it raises instead
        return found

    def destroy(self) -> bool:
        return False


def _parsed(text: bytes, what: str) -> bytes:
    try:
        secret = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise SetupError(f"{what} does not hold a key: {2 * SECRET_BYTES} hexadecimal digits are wanted")
    return secret


def _keyring() -> Any:
    import keyring

    return keyring


def _in_time(call: Callable[[], str | None]) -> str | None:
    """What ``call`` gives, on a thread that is left behind if it takes too long."""
    found: list[str | None] = []
    faults: list[Exception] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as fault:  # backends raise errors of their own systems
            faults.append(fault)

    thread = threading.Thread(target=run, name="keyring", daemon=True)
    thread.start()
    thread.join(KEYRING_SECONDS)
    if faults:
        raise SetupError(f"the keyring cannot be used: {faults[0]}") from faults[0]
    if not found:
        raise SetupError(f"the keyring did not answer in {KEYRING_SECONDS:.0f} s; is it locked?")
    return found[0]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        raise SetupError(f"{path} cannot be made: {fault.strerror}") from fault
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def chosen_store(
    wanted: Literal["auto"] | StoreName,
    key_file: Path,
    variable: str,
    environment: Mapping[str, str],
    noted: StoreName | None,
) -> KeyStore:
    """The store that the options ask for; for "auto" the ``noted`` one, which the folder's files are of.

    Without a note that is the keyring, where there is a usable one, else the file. A noted
    one that cannot be used now is not replaced by another: its own errors say what is wrong.
    """
    name = wanted
    if name == "auto":
        name = noted or ("keyring" if KeyringStore.is_usable() else "file")
    if name == "file":
        return FileStore(key_file)
    if name == "secret":
        return ProvidedStore.of_file(key_file)
    if name == "environment":
        return ProvidedStore.of_environment(variable, environment)
    if "keyring" not in sys.modules and not _is_installed("keyring"):
        raise SetupError("the key is in the keyring, and the package keyring is not installed")
    return KeyringStore(key_file.with_name(f".{key_file.name}.lock"))


def _is_installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None
