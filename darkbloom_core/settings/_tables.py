"""The settings by location, read off the model: ``("server", "port")`` and so on."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from darkbloom_core.settings._model import Settings

FREE_TABLES: dict[str, int] = {"models": 2, "max_rows": 2, "options": 3}
"""Tables whose keys the user chooses, and how many names lead to a value of theirs."""

FREE_VARIABLES: dict[str, int] = {**FREE_TABLES, "keys": 2}
"""The same of variables; keys are no table of the settings file, which others may read."""


def _tables() -> dict[str, type[BaseModel]]:
    return {
        name: field.annotation
        for name, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


TABLES: dict[str, type[BaseModel]] = _tables()

SETTINGS: dict[tuple[str, ...], FieldInfo] = {
    (table, key): field for table, model in TABLES.items() for key, field in model.model_fields.items()
}


def canonical(name: str) -> str:
    """A name that the user chose, as it is compared: variables can write neither ``-`` nor lower case."""
    return name.lower().replace("_", "-")
