"""`darkbloom serve`: load models and serve them until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.plugins import PluginOptions, load_plugins

if TYPE_CHECKING:
    from darkbloom_core.settings import Settings


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("serve")(_serve)


def _serve(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a name that a plugin offers, an alias of the settings, an id in the local "
            "Hugging Face cache, or NAME=one of these. Without any: every model of the settings.",
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve the demo checkpoints too.")] = False,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; one that others can reach needs API keys.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes a free one.")] = None,
    routes: Annotated[
        list[str] | None,
        typer.Option("--routes", metavar="PLUGIN", help="Serve this plugin's routes too. May be repeated."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file.", show_default=False, dir_okay=False)
    ] = None,
    strict_plugins: Annotated[
        bool, typer.Option("--strict-plugins", help="Exit with 1 if any plugin has failed.")
    ] = False,
) -> None:
    """Serve models over HTTP, as OpenAI's API does, until Ctrl-C."""
    command: CommandContext = context.obj
    if strict_plugins:
        command = CommandContext(load_plugins(PluginOptions.from_environment(strict=True)))
    try:
        _run(command, models or [], demo=demo, host=host, port=port, routes=routes or [], config=config)
    except KeyboardInterrupt:  # while models are loaded; later the server takes the signal
        raise typer.Exit(0) from None


def _run(
    command: CommandContext,
    words: list[str],
    *,
    demo: bool,
    host: str | None,
    port: int | None,
    routes: list[str],
    config: Path | None,
) -> None:
    from darkbloom_core.cli._backend import require_backend
    from darkbloom_core.settings import load_settings

    settings = _with_routes(_with_address(load_settings(config), host, port), routes)
    require_backend()
    from darkbloom_core.cli._choose import choose_models
    from darkbloom_core.cli._running import loaded_app
    from darkbloom_core.server import check_address, serve

    check_address(settings)
    chosen = choose_models(command, words or ([] if demo else list(settings.models)), settings, demo=demo)
    with loaded_app(command, settings, chosen) as (app, slots):
        names = ", ".join(slot.name for slot in slots)
        serve(
            app,
            settings.server.host,
            settings.server.port,
            drain_seconds=settings.server.drain_seconds,
            when_ready=lambda url: typer.echo(f"serving {names} at {url}/v1 (Ctrl-C stops)"),
        )


def _with_address(settings: Settings, host: str | None, port: int | None) -> Settings:
    """``settings`` with the command line's address."""
    given = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    return settings.model_copy(update={"server": settings.server.model_copy(update=given)})


def _with_routes(settings: Settings, plugins: list[str]) -> Settings:
    """``settings`` with the routes of ``plugins`` after those that it names itself."""
    named = tuple(dict.fromkeys((*settings.server.route_plugins, *plugins)))
    return settings.model_copy(update={"server": settings.server.model_copy(update={"route_plugins": named})})
