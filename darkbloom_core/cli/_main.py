"""The entry point: loads plugins, lets them add commands, runs one, turns errors into exit codes.

Every ``DarkbloomError`` is one line on stderr, never a traceback. Nothing heavy is imported
before a command runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from darkbloom_core import __version__
from darkbloom_core.cli import _chat, _doctor, _models, _plugins, _serve
from darkbloom_core.cli._context import CommandContext
from darkbloom_core.errors import DarkbloomError, PluginError
from darkbloom_core.plugins import load_plugins


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with ``arguments`` (default: the process's own) and leave by ``SystemExit``.

    Its code is 0 for success, 1 for a failed plugin in strict mode or a failed command,
    2 for a wrong command line or setup.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        plugins = load_plugins()
        app = build_app()
        plugins.cli_commands(app)
        app(args=given, obj=CommandContext(plugins), prog_name="darkbloom")
    except DarkbloomError as error:
        typer.echo(f"darkbloom: {' '.join(error.message.split())}", err=True)
        raise SystemExit(1 if isinstance(error, PluginError) else 2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)


def build_app() -> typer.Typer:
    """The commands of the core, without those of plugins."""
    app = typer.Typer(
        callback=_root,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # importing rich's help would take half of the time
    )
    _serve.add_to(app)
    _chat.add_to(app)
    _models.add_to(app)
    _plugins.add_to(app)
    _doctor.add_to(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"darkbloom {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Serve large language models with MLX, many requests at once."""
