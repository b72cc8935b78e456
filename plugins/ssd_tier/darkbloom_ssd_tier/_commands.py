"""``darkbloom ssd``: what the cache on disk holds, whether it is sound, and its end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from darkbloom_ssd_tier._name import NAME

if TYPE_CHECKING:
    from darkbloom_core.cli import CommandContext
    from darkbloom_core.settings import Settings
    from darkbloom_ssd_tier._folder import Folder
    from darkbloom_ssd_tier._options import SsdOptions
    from darkbloom_ssd_tier._survey import Survey

Config = Annotated[Path | None, typer.Option("--config", help="The settings file.")]


def add_to(app: typer.Typer) -> None:
    """Add the group to ``app``."""
    group = typer.Typer(no_args_is_help=True, help="The encrypted prefix cache on disk.")
    group.command("status")(_status)
    group.command("verify")(_verify)
    group.command("wipe")(_wipe)
    app.add_typer(group, name="ssd")


def _status(
    context: typer.Context,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what the cache holds, its limits, and what was written in the last 24 hours."""
    from darkbloom_ssd_tier._survey import survey

    command: CommandContext = context.obj
    settings, options = _settings(config)
    with _opened(settings, options) as folder:
        names = [*settings.models, *command.plugins.checkpoints()]
        limit = settings.prefix.tier_bytes
        found = survey(folder, options, limit, names, os.environ, time.time())
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    for line in _lines(found, is_used=NAME in settings.prefix.tiers):
        typer.echo(line)


def _verify(
    config: Config = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged.")] = False,
) -> None:
    """Decrypt every file. Exits with 1 if any is damaged."""
    from darkbloom_core.errors import SetupError
    from darkbloom_ssd_tier._keys import Keys
    from darkbloom_ssd_tier._store import key_store_of
    from darkbloom_ssd_tier._survey import verify

    settings, options = _settings(config)
    with _opened(settings, options) as folder:
        store = key_store_of(folder, options, os.environ)
        secret = store.load()
        if secret is None:
            raise SetupError(f"there is no key ({store.name}), so nothing can be checked")
        verdict = verify(folder, Keys.derived(secret), removes=remove)
    typer.echo(f"{verdict.sound} files are sound, {len(verdict.damaged)} damaged, {verdict.removed} removed")
    for line in verdict.damaged:
        typer.echo(f"damaged: {line}")
    for reason, count in sorted(verdict.others.items()):
        typer.echo(f"not checked: {count} {reason}")
    if verdict.damaged:
        raise typer.Exit(1)


def _wipe(
    config: Config = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Destroy the key and all files of the cache. What was kept cannot be had again."""
    from darkbloom_ssd_tier._survey import wipe

    settings, options = _settings(config)
    with _opened(settings, options) as folder:
        if not yes:
            typer.confirm(f"Destroy the key and the cache in {folder.path}?", abort=True)
        removed, is_destroyed, left = wipe(folder, options, os.environ)
    typer.echo(f"removed {removed} files from {folder.path}")
    if is_destroyed:
        typer.echo("the key is destroyed")
    else:
        typer.echo("the key was provided by you and is yours to destroy")
    for name in left:
        typer.echo(f"left alone, not ours: {name}")


def _settings(config: Path | None) -> tuple[Settings, SsdOptions]:
    from darkbloom_core.settings import load_settings
    from darkbloom_ssd_tier._options import read_options

    settings = load_settings(config)
    return settings, read_options(settings.options_of(NAME))


@contextmanager
def _opened(settings: Settings, options: SsdOptions) -> Iterator[Folder]:
    from darkbloom_core.settings import tier_folder
    from darkbloom_ssd_tier._folder import Folder

    path = options.directory or tier_folder(settings, NAME)
    try:
        folder = Folder.open(path, create=False)
    except FileNotFoundError:
        typer.echo(f"there is no cache in {path}")
        raise typer.Exit(0) from None
    try:
        yield folder
    finally:
        folder.close()


def _lines(found: Survey, *, is_used: bool) -> Iterator[str]:
    used = sum(model.disk_bytes for model in found.models)
    files = sum(model.files for model in found.models)
    yield f"folder     {found.folder}"
    if not is_used:
        yield f'           not in use: add "{NAME}" to prefix.tiers'
    yield f"key        {found.key}"
    yield f"on disk    {_size(used)} of {_size(found.disk_bytes_limit)}, {files} files of {found.files_limit}"
    yield f"disk       {_size(found.free_bytes)} free, {_size(found.free_bytes_floor)} of it to be left"
    written, first = found.written.written_bytes, found.written.first_bytes
    yield f"written    {_size(written)} of {_size(found.bytes_per_day)} in 24 hours"
    yield f"           {_size(first)} of {_size(found.first_bytes_per_day)} for prompts seen once"
    for model in found.models:
        name = model.model or f"folder {model.folder}"
        state = "in use" if model.is_in_use else "idle"
        yield f"{name}: {model.files} files, {_size(model.disk_bytes)}, {state}{_extras(model.leftovers, model.strange)}"


def _extras(leftovers: int, strange: int) -> str:
    parts = []
    if leftovers:
        parts.append(f", {leftovers} writes under way or interrupted")
    if strange:
        parts.append(f", {strange} files that are not ours")
    return "".join(parts)


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
