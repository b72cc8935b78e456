"""Read the settings: one TOML file, and ``DARKBLOOM_<TABLE>__<KEY>`` variables over it.

Nothing is ignored: a name that is not a setting, in either place, is an error that says
where it stands and what was probably meant.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from darkbloom_core.errors import SettingsError
from darkbloom_core.settings._environment import PREFIX, read_environment
from darkbloom_core.settings._faults import describe_fault
from darkbloom_core.settings._model import Settings
from darkbloom_core.settings._tables import canonical

CONFIG_VARIABLE = f"{PREFIX}CONFIG"
DEFAULT_CONFIG = Path("~/.config/darkbloom/darkbloom.toml")


def load_settings(
    config_path: Path | str | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """Read the file ``config_path``, else ``DARKBLOOM_CONFIG``, else the default one if it exists.

    ``environment`` is ``os.environ`` unless given. Raises ``SettingsError`` of one line.
    """
    environment = os.environ if environment is None else environment
    path = _config_path(config_path, environment)
    values = {} if path is None else _read_file(path)
    if path is not None:
        if "keys" in values:
            raise SettingsError(
                f"keys in {path}: API keys stand in a file of their own, which server.key_file names, "
                "or in variables DARKBLOOM_KEYS__NAME"
            )
        _validate(values, f"in {path}")
    for location, value in read_environment(environment):
        table = values
        for name in location[:-1]:
            table = table.setdefault(_as_written(table, name), {})
        table[_as_written(table, location[-1])] = value
    return _validate(values, "in the environment")


def _as_written(table: Mapping[str, Any], name: str) -> str:
    """The key of ``table`` that a variable's ``name`` means, if there is one already."""
    return next((key for key in table if canonical(key) == canonical(name)), name)


def _config_path(given: Path | str | None, environment: Mapping[str, str]) -> Path | None:
    named = given if given is not None else environment.get(CONFIG_VARIABLE)
    if named:
        return Path(named).expanduser()
    try:
        default = DEFAULT_CONFIG.expanduser()
    except RuntimeError:  # no home directory, so no file in it
        return None
    return default if default.exists() else None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"the settings file {path} does not exist") from error
    except OSError as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from error


def _validate(values: dict[str, Any], where: str) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(describe_fault(error.errors(include_url=False)[0], where)) from error
