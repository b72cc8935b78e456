"""What every command can reach: ``context.obj`` of the running Typer context."""

from __future__ import annotations

from dataclasses import dataclass

from darkbloom_core.plugins import Plugins


@dataclass(frozen=True, slots=True)
class CommandContext:
    """``plugins`` are those that this process loaded. A plugin's command finds this in ``typer.Context.obj``."""

    plugins: Plugins
