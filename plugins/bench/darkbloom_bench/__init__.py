"""Benchmarks of darkbloom, alone or beside a named peer in the same process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkbloom_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

api_version = (1, 0)


@hookimpl
def cli_commands(app: typer.Typer) -> None:
    """``darkbloom bench``."""
    from darkbloom_bench._command import add_to

    add_to(app)
