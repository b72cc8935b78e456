"""The API keys: each has a name, and stands in the key file or in a variable ``DARKBLOOM_KEYS__NAME``.

Always true: no error and no ``repr`` shows a key; each is long enough that nobody guesses it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from darkbloom_core.errors import SettingsError
from darkbloom_core.settings._model import Settings

LEAST_KEY_CHARACTERS = 16
MOST_FILE_BYTES = 1024 * 1024

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_KEY = re.compile(rf"[\x21-\x7e]{{{LEAST_KEY_CHARACTERS},512}}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """``key`` is what a client shows, ``name`` whose it is."""

    name: str
    key: str = field(repr=False)


def read_keys(settings: Settings) -> tuple[ApiKey, ...]:
    """All API keys, from the file and from the environment; none if neither names one.

    Raises ``SettingsError`` for a file that is missing, empty or open to all users, for a key
    or a name that is none, for one that is there twice, and for limits of keys without a key.
    """
    places: dict[str, str] = {}
    keys: dict[str, ApiKey] = {}
    for where, key in (*_file_keys(settings.server.key_file), *_variable_keys(settings)):
        for other in keys.values():
            if other.name == key.name or other.key == key.key:
                what = "name" if other.name == key.name else "key"
                raise SettingsError(f"{where} has the {what} that {places[other.name]} has already")
        keys[key.name], places[key.name] = key, where
    server = settings.server
    if not keys and (server.key_concurrency or server.key_requests_per_minute):
        limit = "key_concurrency" if server.key_concurrency else "key_requests_per_minute"
        raise SettingsError(
            f"server.{limit} limits what each API key may do, but there is none: set server.key_file"
        )
    return tuple(keys.values())


def require_key(host: str, *, needs_key: bool) -> None:
    """Raise ``SettingsError`` if others can reach ``host`` and requests need no key."""
    if not needs_key and not _is_loopback(host):
        raise SettingsError(
            f"server.host {host} can be reached from other machines, and requests would need no API key: "
            "name a file of keys in server.key_file, or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _file_keys(name: str | None) -> Iterator[tuple[str, ApiKey]]:
    if name is None:
        return
    path = Path(name).expanduser()
    lines = [line.split() for line in _private_text(path).splitlines()]
    found = [(number, words) for number, words in enumerate(lines, 1) if words and words[0][0] != "#"]
    for number, words in found:
        where = f"{path} line {number}"
        if len(words) != 2:
            raise SettingsError(f"{where} must be a name and a key with a space between")
        yield where, _checked(where, *words)
    if not found:
        raise SettingsError(f"the key file {path} holds no key: write a name, a space and a key on a line")


def _variable_keys(settings: Settings) -> Iterator[tuple[str, ApiKey]]:
    for name, secret in settings.keys.items():
        where = f"DARKBLOOM_KEYS__{name.upper()}"
        yield where, _checked(where, name, secret.get_secret_value())


def _checked(where: str, name: str, key: str) -> ApiKey:
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"{where}: a key's name has 1 to 64 of the characters a-z, 0-9, '.', '_' and '-', and begins with one of the first two"
        )
    if not _KEY.fullmatch(key):
        raise SettingsError(
            f"{where}: a key has {LEAST_KEY_CHARACTERS} to 512 printable ASCII characters and no space, "
            "such as `openssl rand -hex 24` writes"
        )
    return ApiKey(name, key)


def _private_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & stat.S_IRWXO:
                raise SettingsError(f"the key file {path} is open to all users: chmod o= {path}")
            return file.read(MOST_FILE_BYTES).decode("utf-8")
    except OSError as error:
        raise SettingsError(f"the key file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"the key file {path} is not UTF-8") from None
