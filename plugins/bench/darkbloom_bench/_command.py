"""``darkbloom bench``: what to measure, and where the figures go. Light: it is imported for every command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from darkbloom_bench._choices import (
    Against,
    Config,
    JsonFile,
    ModelName,
    RandomShape,
    Shape,
    check_peer,
    choose_subject,
    say,
    settle,
)
from darkbloom_bench._prefix_command import add_to as add_prefix_commands

if TYPE_CHECKING:
    from darkbloom_bench._measure import Cell

DEFAULT_WORKLOADS = "rows-1,rows-4,rows-8"
FEWEST_ENGINE_ROWS = 8


def add_to(app: typer.Typer) -> None:
    """Add the group to ``app``."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure, alone or beside a peer.")
    group.callback()(_group)
    group.command("engine")(_engine)
    add_prefix_commands(group)
    app.add_typer(group, name="bench")


def _group() -> None:
    """Measure, alone or beside a peer."""


def _engine(
    context: typer.Context,
    model: ModelName = None,
    shape: Shape = None,
    random: RandomShape = None,
    against: Against = None,
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
    json_file: JsonFile = None,
    config: Config = None,
) -> None:
    """Measure the engine in this process: rates, latencies, and their ratios to a peer's."""
    check_peer(against)
    from rich.console import Console

    from darkbloom_bench._machine import this_machine
    from darkbloom_bench._measure import measure
    from darkbloom_bench._report import as_json, show
    from darkbloom_bench._subject import longest, opened
    from darkbloom_bench._workloads import Sizes, workload
    from darkbloom_core.engine import EngineOptions
    from darkbloom_core.slots import current_device

    settings, subject = choose_subject(context.obj, config, model, shape, random)
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
        fused=compiled is True,
        chained=chained,
        packed=packed,
    )
    machine = this_machine(current_device())
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
            cells += measure(each, ours, peer, repeats, say, settle)
            if json_file is not None:
                json_file.write_text(as_json(cells, subject.name, machine, repeats) + "\n")
    show(cells, against, console)
