"""Typed access to the fields of a ``config.json``, so that every refusal names the field.

Always true: what was never asked for can be listed afterwards, so no field is overlooked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from darkbloom_core.errors import UnsupportedCheckpoint

_REQUIRED = object()


class Fields:
    """The fields of one JSON object of ``file``; ``place`` is its path in there, with a dot at the end."""

    def __init__(self, values: Mapping[str, Any], place: str = "", file: str = "config.json") -> None:
        self.values = values
        self.place = place
        self.file = file
        self._asked: set[str] = set()

    def refuse(self, name: str, reason: str) -> NoReturn:
        raise UnsupportedCheckpoint(f"{self.file}: {self.place}{name} {reason}")

    def get(self, name: str) -> Any:
        """The raw value, None if it is missing."""
        self._asked.add(name)
        return self.values.get(name)

    def integer(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """A whole number of at least ``least``; a missing or null one is ``default``."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(name, f"must be a whole number of at least {least}, not {value!r}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A number above 0; a missing or null one is ``default``."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.refuse(name, f"must be a number above 0, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A number above 0, or None if it is missing or null."""
        return None if self.get(name) is None else self.number(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {value!r}")
        return value

    def table(self, name: str) -> Fields | None:
        """A JSON object, or None if it is missing or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, f"must be an object, not {value!r}")
        return Fields(value, f"{self.place}{name}.", self.file)

    def not_asked(self) -> list[str]:
        """Names in the file that nothing has asked for."""
        return [name for name in self.values if name not in self._asked]

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.refuse(name, "is missing")
        return default
