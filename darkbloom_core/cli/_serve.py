"""`darkbloom serve`: load models and serve them until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from darkbloom_core.errors import SetupError


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
            "Hugging Face cache, or NAME=one of these.",
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve the demo checkpoints too.")] = False,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; other than loopback it needs a key.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes a free one.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file.", show_default=False, dir_okay=False)
    ] = None,
    strict_plugins: Annotated[  # noqa: ARG001  # main looks for it before the command line is parsed
        bool, typer.Option("--strict-plugins", help="Exit with 1 if any plugin has failed.")
    ] = False,
) -> None:
    """Serve models over HTTP, as OpenAI's API does, until Ctrl-C."""
    if not models and not demo:
        raise SetupError("name a model, or use --demo; `darkbloom models list` shows what can be named here")
