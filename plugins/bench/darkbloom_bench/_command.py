"""``darkbloom bench``: what to measure, and where the figures go. Light: it is imported for every command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from darkbloom_core.cli import CommandContext
from darkbloom_core.errors import SettingsError

if TYPE_CHECKING:
    from darkbloom_bench._measure import Cell
    from darkbloom_bench._subject import Subject
    from darkbloom_core.contracts import Device
    from darkbloom_core.settings import Settings

PEERS = ("mlx-lm",)
DEFAULT_WORKLOADS = "rows-1,rows-4,rows-8"
FEWEST_ENGINE_ROWS = 8


def add_to(app: typer.Typer) -> None:
    """Add the group to ``app``."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure, alone or beside a peer.")
    group.callback()(_group)
    group.command("engine")(_engine)
    app.add_typer(group, name="bench")


def _group() -> None:
    """Measure, alone or beside a peer."""


def _engine(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option("--model", help="A checkpoint: any name that `serve` takes.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Random weights in a published model's true shape.")
    ] = None,
    random: Annotated[
        Path | None,
        typer.Option("--random", help="Random weights in the shape of this config.json.", dir_okay=False),
    ] = None,
    against: Annotated[str | None, typer.Option("--against", help="A peer: mlx-lm.")] = None,
    workloads: Annotated[
        str,
        typer.Option(
            "--workload",
            help="Comma-separated: solo, uniform, mixed, short, churn, interference, rows-N, rows-NxPROMPT.",
        ),
    ] = DEFAULT_WORKLOADS,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Counted runs of each kind and side.")] = 5,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, help="Output tokens of a row.")] = 128,
    slice_milliseconds: Annotated[
        float | None, typer.Option("--slice-milliseconds", help="Instead of the settings' own.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", min=16, help="Instead of the settings' own.")
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--not-compiled", help="Instead of the engine's own choice.")
    ] = None,
    chained: Annotated[
        bool | None, typer.Option("--chained/--not-chained", help="Instead of the engine's own choice.")
    ] = None,
    packed: Annotated[
        bool | None, typer.Option("--packed/--not-packed", help="Instead of the engine's own choice.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="One fixed batch shape for every decode step.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write a list of cells to this file.", dir_okay=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file.", show_default=False, dir_okay=False)
    ] = None,
) -> None:
    """Measure the engine in this process: rates, latencies, and their ratios to a peer's."""
    if against is not None and against not in PEERS:
        raise SettingsError(f"no peer {against!r}: there is {', '.join(PEERS)}")
    from rich.console import Console

    from darkbloom_bench._machine import this_machine
    from darkbloom_bench._measure import measure
    from darkbloom_bench._report import as_json, show
    from darkbloom_bench._subject import longest, opened
    from darkbloom_bench._workloads import Sizes, workload
    from darkbloom_core.engine import EngineOptions
    from darkbloom_core.settings import load_settings
    from darkbloom_core.slots import current_device

    settings = load_settings(config)
    device = current_device()
    subject = _subject(context.obj, settings, device, model, shape, random)
    sizes = Sizes(vocab_size=subject.description.vocab_size, new_tokens=new_tokens)
    chosen = [workload(name.strip(), sizes) for name in workloads.split(",")]
    tokens = longest([each.longest_tokens for each in chosen], subject.description)
    options = EngineOptions(
        max_rows=max(FEWEST_ENGINE_ROWS, *(each.rows for each in chosen)),
        waiting_limit=settings.engine.waiting_limit,
        chunk_tokens=chunk_tokens or settings.engine.chunk_tokens,
        slice_seconds=(slice_milliseconds or settings.engine.slice_milliseconds) / 1000,
        event_buffer=settings.engine.event_buffer,
        deterministic=deterministic,
        compiled=compiled,
        chained=chained,
        packed=packed,
    )
    machine = this_machine(device)
    console = Console()
    console.print(f"{subject.name} on {machine}", markup=False, soft_wrap=True)
    console.print(
        f"greedy, {new_tokens} new tokens, medians of {repeats} after a warm-up, "
        f"chunks of {options.chunk_tokens} tokens, slices of {options.slice_seconds * 1000:g} ms",
        markup=False,
        soft_wrap=True,
    )
    cells: list[Cell] = []
    with opened(subject, options, tokens, compare=against is not None) as (ours, peer):
        console.print(f"chosen at warm-up: {ours.choices}", markup=False, soft_wrap=True)
        for each in chosen:
            cells += measure(each, ours, peer, repeats, _say, _settle)
            if json_file is not None:
                json_file.write_text(as_json(cells, subject.name, machine, repeats) + "\n")
    show(cells, against, console)


def _subject(
    command: CommandContext,
    settings: Settings,
    device: Device,
    model: str | None,
    shape: str | None,
    random: Path | None,
) -> Subject:
    from darkbloom_bench._subject import checkpoint_subject, config_subject, shape_subject
    from darkbloom_core.slots import ModelPlaces, hub_folder

    if sum(each is not None for each in (model, shape, random)) != 1:
        raise SettingsError("say one of --model, --shape and --random")
    plugins = command.plugins
    if shape is not None:
        return shape_subject(shape, plugins, device)
    if random is not None:
        return config_subject(random, plugins, device)
    assert model is not None
    places = ModelPlaces(hub=hub_folder(os.environ), aliases=settings.models, offered=plugins.checkpoints())
    return checkpoint_subject(model, places, plugins, device)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _settle() -> None:
    """Give back what the last run left behind: garbage, and MLX's cache of buffers."""
    import gc

    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
