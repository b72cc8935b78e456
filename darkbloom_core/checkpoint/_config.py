"""Reading a checkpoint's JSON files, so that every fault is one line that names the file."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from darkbloom_core.errors import CheckpointError


def check_folder(path: Path) -> None:
    """Raise ``CheckpointError`` unless ``path`` is a folder."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  # Path.is_dir hides why not
    except OSError as error:
        raise CheckpointError(f"{path}: {_reason(error, 'no such folder')}") from error
    if not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path}: not a folder; a checkpoint is a folder with a config.json")


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises ``CheckpointError`` naming it if it is missing or cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {_reason(error, 'no such file')}") from error


def read_text(path: Path) -> str:
    """The whole file as UTF-8 text, with ``CheckpointError`` for every fault."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text (byte {error.start})") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``, with ``CheckpointError`` for every fault."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path}: not JSON ({error.msg}, line {error.lineno} column {error.colno})"
        ) from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: not usable JSON (nested too deeply)") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` of the checkpoint folder ``path``; it has a ``model_type``."""
    check_folder(path)
    config = read_json(path / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(f"{path / 'config.json'}: no model_type, so nothing says what model this is")
    return config


def read_generation_config(path: Path) -> dict[str, Any]:
    """``generation_config.json`` of the checkpoint folder ``path``; ``{}`` if there is none."""
    file = path / "generation_config.json"
    return read_json(file) if present(file) else {}


def present(file: Path) -> bool:
    """Whether there is something of this name, readable or not (a broken link is something)."""
    return os.path.lexists(file)


def _reason(error: OSError, missing: str) -> str:
    if error.errno == errno.ENOENT:
        return missing
    if error.errno == errno.ELOOP:
        return "a loop of symbolic links"
    return (error.strerror or str(error)).lower()
