"""The table ``[options.dialects]`` of the settings."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from darkbloom_core.errors import SettingsError

if TYPE_CHECKING:
    from darkbloom_core.settings import Settings


@dataclass(frozen=True, slots=True)
class DialectOptions:
    """How much is kept of finished responses, so that later ones can go on from them; 0 keeps none.

    ``stored_bytes`` is the length of what is kept, written as JSON.
    """

    stored_responses: int = 1000
    stored_bytes: int = 64 * 2**20


def read_options(settings: Settings) -> DialectOptions:
    """Raises ``SettingsError`` that names the option which is unknown or wrong."""
    given = settings.options_of("dialects")
    known = [field.name for field in fields(DialectOptions)]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise SettingsError(f"unknown option options.dialects.{name}: {meant}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise SettingsError(f"options.dialects.{name} must be a whole number, at least 0, not {value!r}")
    return DialectOptions(**given)
