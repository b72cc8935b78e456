"""What is in a cache folder, for a person: a look, a check of every file, and the end of it all.

Always true: looking changes nothing; a wipe destroys the key before the first file, so what it
leaves behind if it is interrupted can be read by nobody; what is not of our pattern stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from darkbloom_core.errors import SetupError
from darkbloom_ssd_tier._accounts import FILE, Accounts, Hour
from darkbloom_ssd_tier._folder import ABOUT, LOCK, TAG_FILE, Folder, reading, remove, scan
from darkbloom_ssd_tier._format import SUFFIX, Damaged, header_of, plain_bytes, read_part
from darkbloom_ssd_tier._keys import Keys
from darkbloom_ssd_tier._options import SsdOptions
from darkbloom_ssd_tier._store import budget_of, key_store_of, limits_of


@dataclass(slots=True)
class ModelSurvey:
    """A model's folder; ``model`` is its name if it is one of those asked about."""

    folder: str
    model: str | None = None
    is_in_use: bool = False
    files: int = 0
    disk_bytes: int = 0
    leftovers: int = 0
    strange: int = 0
    last_used_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A whole cache. ``key`` says where its key is, or what is wrong with it."""

    folder: str
    key: str
    disk_bytes_limit: int
    files_limit: int
    free_bytes: int
    free_bytes_floor: int
    written: Hour
    bytes_per_day: int
    first_bytes_per_day: int
    models: tuple[ModelSurvey, ...]


def survey(
    folder: Folder,
    options: SsdOptions,
    bytes_limit: int | None,
    names: Sequence[str],
    environment: Mapping[str, str],
    now: float,
) -> Survey:
    """Look. ``names`` are models whose folders are told by name, if the key is there."""
    keys, key = _find_key(folder, options, environment)
    known = {} if keys is None else {keys.folder_name(name): name for name in names}
    free, size = folder.free_bytes()
    limits, budget = limits_of(options, bytes_limit, size), budget_of(options, size)
    return Survey(
        folder=str(folder.path),
        key=key,
        disk_bytes_limit=limits.disk_bytes,
        files_limit=limits.files,
        free_bytes=free,
        free_bytes_floor=limits.free_bytes_floor,
        written=Accounts(folder.handle).peek(now).written(now),
        bytes_per_day=budget.bytes_per_day,
        first_bytes_per_day=budget.first_bytes_per_day,
        models=tuple(_survey_model(folder, model, known.get(model)) for model in folder.models()),
    )


@dataclass(slots=True)
class Verdict:
    """How many files are sound, and which are not; ``removed`` of the damaged ones are gone."""

    sound: int = 0
    damaged: list[str] = field(default_factory=list)
    removed: int = 0
    others: Counter[str] = field(default_factory=Counter)
    """What cannot be checked, and why."""


def verify(folder: Folder, keys: Keys, *, removes: bool) -> Verdict:
    """Decrypt every file."""
    verdict = Verdict()
    for model in folder.models():
        with folder.model(model) as handle, _lock(handle) as is_ours:
            for found in list(scan(handle)):
                if found.kind in ("temporary", "strange"):
                    verdict.others[
                        "a write under way or interrupted"
                        if found.kind == "temporary"
                        else "no file of the cache"
                    ] += 1
                elif not found.name.endswith(SUFFIX):
                    verdict.others["of another format"] += 1
                elif (fault := _fault(handle, found.name, keys, verdict)) is not None:
                    verdict.damaged.append(f"{model}/{found.name}: {fault}")
                    if removes and is_ours and remove(handle, found.name):
                        verdict.removed += 1
    return verdict


def wipe(folder: Folder, options: SsdOptions, environment: Mapping[str, str]) -> tuple[int, bool, list[str]]:
    """Destroy key and files: how many files, whether the key is gone, and what was left alone.

    Raises ``SetupError`` if a process uses the cache.
    """
    removed, left = 0, []
    with contextlib.ExitStack() as stack:
        handles = {model: stack.enter_context(folder.model(model)) for model in folder.models()}
        for model, handle in handles.items():
            if not stack.enter_context(_lock(handle)):
                raise SetupError(f"{folder.path / model} is in use: stop what serves models from it first")
        is_destroyed = key_store_of(
            folder, options, environment, ignores_note=not _has_note(folder)
        ).destroy()
        for model, handle in handles.items():
            for found in list(scan(handle)):
                if found.kind != "strange" and remove(handle, found.name):
                    removed += 1
                else:
                    left.append(f"{model}/{found.name}")
            folder.remove_model(model)
    for name in (FILE, TAG_FILE, ABOUT):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder.handle)
    with contextlib.suppress(OSError):
        folder.path.rmdir()
    return removed, is_destroyed, left


def _find_key(folder: Folder, options: SsdOptions, environment: Mapping[str, str]) -> tuple[Keys | None, str]:
    try:
        store = key_store_of(folder, options, environment)
        secret = store.load()
    except SetupError as fault:
        return None, f"not available: {fault.message}"
    if secret is None:
        return None, f"none yet; it will be made ({store.name})"
    keys = Keys.derived(secret)
    return keys, f"{store.name}, id {keys.key_id.hex()}"


def _has_note(folder: Folder) -> bool:
    try:
        return folder.read_about() is not None
    except SetupError:
        return False


def _survey_model(folder: Folder, name: str, model: str | None) -> ModelSurvey:
    found = ModelSurvey(name, model)
    with folder.model(name) as handle:
        with _lock(handle, shared=True) as is_free:
            found.is_in_use = not is_free
        for each in scan(handle):
            found.disk_bytes += each.disk_bytes
            if each.kind == "part":
                found.files += 1
                found.last_used_at = max(found.last_used_at or 0.0, each.modified_at)
            elif each.kind == "temporary":
                found.leftovers += 1
            else:
                found.strange += 1
    return found


def _fault(handle: int, name: str, keys: Keys, verdict: Verdict) -> str | None:
    """What is wrong with a file; sound ones and those of another key are counted."""
    try:
        with reading(handle, name) as (read, _):
            key_id, _, _ = header_of(read)
        if key_id != keys.key_id:
            verdict.others["of another key"] += 1
            return None
        with reading(handle, name) as (read, size):
            length = plain_bytes(size)
            if length is None:
                return "no file of the cache has this length"
            read_part(keys, bytes.fromhex(name.removesuffix(SUFFIX)), read, memoryview(bytearray(length)))
    except (Damaged, OSError) as fault:
        return str(fault)
    verdict.sound += 1
    return None


@contextlib.contextmanager
def _lock(handle: int, *, shared: bool = False) -> Iterator[bool]:
    """Whether nobody else has a model folder's lock, which is then held meanwhile."""
    try:
        lock = os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        is_free = True
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        os.close(lock)
