"""The hooks that a plugin may implement; all are optional.

A plugin is a module named by an entry point of the group ``darkbloom``::

    from darkbloom_core.hookspecs import hookimpl

    api_version = (1, 0)

    @hookimpl
    def model_families():
        from my_family import MyFamily   # heavy imports stay inside
        return [MyFamily()]

A module may also have ``notice``, a line about itself that `darkbloom plugins` shows. A
hook that is given the settings raises ``SettingsError`` if its options are wrong; whatever
else a hook raises marks its plugin failed and stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from darkbloom_core.contracts import CacheTierFactory, ModelFamily, TelemetrySink

if TYPE_CHECKING:
    import typer
    from starlette.routing import BaseRoute

    from darkbloom_core.settings import Settings

hookspec = pluggy.HookspecMarker("darkbloom")
hookimpl = pluggy.HookimplMarker("darkbloom")


@hookspec
def model_families() -> Sequence[ModelFamily]:  # type: ignore[empty-body]  # a hookspec has no body
    """Model families that this plugin adds."""


@hookspec
def cache_tiers() -> Sequence[CacheTierFactory]:  # type: ignore[empty-body]  # a hookspec has no body
    """Cache tiers that this plugin adds, asked in the order of the settings."""


@hookspec
def telemetry_sinks(settings: Settings) -> Sequence[TelemetrySink]:  # type: ignore[empty-body]  # a hookspec has no body
    """Sinks for telemetry events, made once when a server or an engine starts."""


@hookspec
def cli_commands(app: typer.Typer) -> None:
    """Add commands or groups to the command line."""


@hookspec
def server_routes(settings: Settings) -> Sequence[BaseRoute]:  # type: ignore[empty-body]  # a hookspec has no body
    """Routes for the HTTP server; asked only of plugins named in ``server.route_plugins``."""


@hookspec
def checkpoints() -> Mapping[str, Path]:  # type: ignore[empty-body]  # a hookspec has no body
    """Checkpoints that this plugin brings: a model name to its folder."""
