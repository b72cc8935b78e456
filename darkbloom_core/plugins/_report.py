"""What became of each plugin, as `darkbloom plugins` and `/health/ready` show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

PluginState: TypeAlias = Literal[
    "loaded",
    "blocked",
    "not allowed",
    "not installed",
    "duplicate name",
    "failed to import",
    "wrong contract version",
    "bad hook",
    "failed",
]

_NO_FAILURE: frozenset[PluginState] = frozenset({"loaded", "blocked", "not allowed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginReport:
    """One plugin. ``reason`` is one line that says what is wrong and what to do about it.

    ``distribution`` and ``version`` are None where the package's metadata does not say.
    ``notice`` is what the plugin itself has to tell (its module's ``notice``). A loaded
    plugin has a reason only if it was written for a newer minor version of the contract.
    """

    name: str
    distribution: str | None
    version: str | None
    hooks: tuple[str, ...]
    state: PluginState
    reason: str | None = None
    notice: str | None = None

    @property
    def failed(self) -> bool:
        """Whether something is wrong, as opposed to loaded or left out on purpose."""
        return self.state not in _NO_FAILURE
