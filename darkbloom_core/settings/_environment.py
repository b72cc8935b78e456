"""Settings from environment variables: ``DARKBLOOM_SERVER__PORT`` is ``port`` of the table ``server``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from darkbloom_core.errors import SettingsError
from darkbloom_core.settings._faults import complaint
from darkbloom_core.settings._tables import FREE_VARIABLES, SETTINGS

PREFIX = "DARKBLOOM_"
SEPARATOR = "__"

RESERVED: dict[str, str] = {
    "DARKBLOOM_CONFIG": "The settings file, if none is given on the command line.",
    "DARKBLOOM_API_KEY": "The API key that `darkbloom chat --url` shows to the server.",
    "DARKBLOOM_PLUGINS": "The only plugins that may load: names with commas between.",
    "DARKBLOOM_BLOCK_PLUGINS": "Plugins that never load: names with commas between.",
}
"""Variables with our prefix that are not settings, and what they mean."""


def variable_name(table: str, key: str) -> str:
    """The variable of one setting."""
    return f"{PREFIX}{table.upper()}{SEPARATOR}{key.upper()}"


def read_environment(environment: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (location, value) of each setting among ``environment``, in order of name.

    Raises ``SettingsError`` that names the variable if it is no setting or has no such value.
    """
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        location = tuple(variable[len(PREFIX) :].lower().split(SEPARATOR))
        if location in SETTINGS:
            yield location, _parse(variable, environment[variable], SETTINGS[location])
        elif len(location) == FREE_VARIABLES.get(location[0]) and all(location):
            yield location, environment[variable]
        else:
            raise SettingsError(f"unknown setting {variable} in the environment: {_suggestion(variable)}")


def _parse(variable: str, text: str, field: FieldInfo) -> Any:
    """The value that ``text`` stands for; a list is written with commas between."""
    kind = field.annotation
    value = [part.strip() for part in text.split(",") if part.strip()] if get_origin(kind) is tuple else text
    try:
        limited: Any = Annotated[(kind, *field.metadata)] if field.metadata else kind
        return TypeAdapter(limited).validate_python(value)
    except ValidationError as error:
        raise SettingsError(f"{variable} {complaint(error.errors(include_url=False)[0])}") from error


def _suggestion(variable: str) -> str:
    known = [*RESERVED, *(variable_name(table, key) for table, key in SETTINGS)]
    if near := difflib.get_close_matches(variable, known, n=1, cutoff=0.8):
        return f"did you mean {near[0]}?"
    return "settings are written DARKBLOOM_<TABLE>__<KEY>, as in DARKBLOOM_SERVER__PORT"
