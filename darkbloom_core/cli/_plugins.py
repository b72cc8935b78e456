"""`darkbloom plugins`: what is installed, what became of it, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.plugins import PluginReport


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("plugins")(_show_plugins)


def _show_plugins(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list on stdout.")] = False,
    strict_plugins: Annotated[
        bool, typer.Option("--strict-plugins", help="Exit with 1 if any plugin has failed.")
    ] = False,
) -> None:
    """List the installed plugins, their state and what is wrong with those that failed."""
    command: CommandContext = context.obj
    reports = command.plugins.verify()
    if as_json:
        typer.echo(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        _print_table(reports)
    if strict_plugins and any(report.failed for report in reports):
        raise typer.Exit(1)


def _print_table(reports: tuple[PluginReport, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("plugin", "package", "version", "hooks", "state"):
        table.add_column(heading, overflow="fold")
    for report in reports:
        state = Text(report.state, style="red" if report.failed else "")
        hooks = ", ".join(report.hooks)
        table.add_row(report.name, report.distribution or "?", report.version or "?", hooks, state)
    console.print(table)
    for report in reports:
        for line in filter(None, (report.reason, report.notice)):
            console.print(Text(f"{report.name}: {line}"), soft_wrap=True)
