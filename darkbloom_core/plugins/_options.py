"""Which installed plugins may load, and whether a broken one is fatal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

ALLOW_VARIABLE = "DARKBLOOM_PLUGINS"
BLOCK_VARIABLE = "DARKBLOOM_BLOCK_PLUGINS"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """``allow`` and ``block`` hold entry-point names; a blocked name is never loaded.

    ``allow`` None means every installed plugin, an empty set none. With ``strict`` any
    failure raises ``PluginError``.
    """

    allow: frozenset[str] | None = None
    block: frozenset[str] = frozenset()
    strict: bool = False

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, *, strict: bool = False
    ) -> PluginOptions:
        """Read ``DARKBLOOM_PLUGINS`` and ``DARKBLOOM_BLOCK_PLUGINS``, lists of names with commas between."""
        values = os.environ if environment is None else environment
        allow = values.get(ALLOW_VARIABLE)
        return cls(
            allow=None if allow is None else _names(allow),
            block=_names(values.get(BLOCK_VARIABLE, "")),
            strict=strict,
        )


def _names(text: str) -> frozenset[str]:
    return frozenset(name for name in (part.strip() for part in text.split(",")) if name)
