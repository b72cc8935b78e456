"""`darkbloom doctor`: what is wrong with this machine, its plugins and its checkpoints, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from darkbloom_core.cli._check import Check
from darkbloom_core.cli._context import CommandContext
from darkbloom_core.errors import SettingsError, SetupError

if TYPE_CHECKING:
    from darkbloom_core.settings import Settings


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("doctor")(_doctor)


def _doctor(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Models to look at; without any, every model of the settings."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file.", show_default=False, dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Look for what is wrong here and say what to do about it. Loads nothing; exit code 1 if something failed."""
    command: CommandContext = context.obj
    checks = list(_all_checks(command, models or [], config))
    failed = any(check.state == "failure" for check in checks)
    if as_json:
        whole = {"status": "failure" if failed else "ok", "checks": [asdict(check) for check in checks]}
        typer.echo(json.dumps(whole, indent=2))
    else:
        for check in checks:
            _print(check)
    if failed:
        raise typer.Exit(1)


def plugin_checks(command: CommandContext) -> Iterator[Check]:
    """Each plugin that failed, or one line that none did."""
    reports = command.plugins.verify()
    failed = [report for report in reports if report.failed]
    for report in failed:
        found = f"{report.name} ({report.distribution or 'of an unknown package'}) is {report.state}"
        yield Check(name="plugin", state="failure", found=found, advice=report.reason)
    if not failed:
        names = ", ".join(sorted(report.name for report in reports if report.state == "loaded"))
        yield Check(name="plugins", state="ok", found=f"loaded: {names or 'none'}")


def _all_checks(command: CommandContext, words: Sequence[str], config: Path | None) -> Iterator[Check]:
    from darkbloom_core.cli._backend import require_backend
    from darkbloom_core.settings import Settings, load_settings

    settings = Settings()
    try:
        settings = load_settings(config)
        yield Check(name="settings", state="ok", found="every name and value is known")
    except SettingsError as error:
        yield Check(
            name="settings",
            state="failure",
            found=error.message,
            advice="see docs/settings.md for all of them",
        )
    yield _access(settings)
    yield from plugin_checks(command)
    try:
        require_backend()
    except SetupError as error:
        yield Check(name="MLX", state="failure", found=error.message)
        return
    from darkbloom_core.cli._checks import machine_checks, model_checks, this_patient

    patient = this_patient(command, settings)
    yield from machine_checks(patient)
    yield from model_checks(patient, words or list(settings.models))


def _access(settings: Settings) -> Check:
    """Where the server would listen, and who could ask it."""
    from darkbloom_core.settings import read_keys, require_key

    host = settings.server.host
    try:
        names = [key.name for key in read_keys(settings)]
        require_key(host, needs_key=bool(names))
    except SettingsError as error:
        return Check(
            name="access", state="failure", found=error.message, advice="see docs/security.md about keys"
        )
    who = f"API keys of {', '.join(names)}" if names else "no API key is needed"
    return Check(name="access", state="ok", found=f"{host}, {who}", facts={"host": host, "keys": names})


def _print(check: Check) -> None:
    colour = {"ok": None, "warning": typer.colors.YELLOW, "failure": typer.colors.RED}[check.state]
    typer.echo(f"{typer.style(f'{check.state:<9}', fg=colour)}{check.name}: {check.found}")
    if check.advice:
        typer.echo(f"{'':<9}{check.advice}")
