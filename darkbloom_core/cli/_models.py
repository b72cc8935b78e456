"""`darkbloom models`: what can be named here, and what a checkpoint is, without loading it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.cli._format import byte_text, count_text
from darkbloom_core.contracts import LayerKind, ModelDescription
from darkbloom_core.errors import SetupError, UnsupportedCheckpoint

if TYPE_CHECKING:
    from darkbloom_core.settings import Settings
    from darkbloom_core.slots import ModelPlaces

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings file.", show_default=False, dir_okay=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One line of the list. If it cannot be served here, ``family`` is None and ``problem`` says why."""

    name: str
    source: str
    path: str | None
    weight_bytes: int
    family: str | None
    problem: str | None


def add_to(app: typer.Typer) -> None:
    """Add the group to ``app``."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="List, inspect and plan checkpoints."
    )
    group.command("list")(_list_models)
    group.command("inspect")(_inspect_model)
    group.command("plan")(_plan)
    app.add_typer(group, name="models")


def _list_models(context: typer.Context, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the checkpoints that can be named here: aliases, those of plugins, the Hugging Face cache."""
    command: CommandContext = context.obj
    settings = _settings(config)
    from darkbloom_core.cli._places import model_places

    places = model_places(command, settings)
    models = [_listed(command, name, source, places) for name, source in sorted(_nameable(places).items())]
    if as_json:
        typer.echo(json.dumps([asdict(model) for model in models], indent=2))
        return
    if not models:
        typer.echo("no model can be named here; give a folder, or an alias in the settings")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("model", "family", "weights", "from"):
        table.add_column(heading, overflow="fold")
    for model in models:
        size = byte_text(model.weight_bytes) if model.weight_bytes else "none"
        table.add_row(model.name, model.family or "none", size, model.source)
    console = Console(highlight=False)
    console.print(table)
    for model in models:
        if model.problem:
            console.print(Text(f"{model.name}: {model.problem}"), soft_wrap=True)


def _nameable(places: ModelPlaces) -> dict[str, str]:
    """Every name, in order, and where it comes from."""
    from darkbloom_core.slots import hub_checkpoints

    return {
        **dict.fromkeys(hub_checkpoints(places.hub), "Hugging Face cache"),
        **dict.fromkeys(places.offered, "plugin"),
        **dict.fromkeys(places.aliases, "settings"),
    }


def _settings(config: Path | None) -> Settings:
    """The settings, after a check that what comes next can be imported."""
    from darkbloom_core.cli._backend import require_backend
    from darkbloom_core.settings import load_settings

    require_backend()
    return load_settings(config)


def _listed(command: CommandContext, name: str, source: str, places: ModelPlaces) -> ListedModel:
    from darkbloom_core.checkpoint import read_config
    from darkbloom_core.slots import resolve_model

    path: Path | None = None
    family: str | None = None
    problem: str | None = None
    try:
        path = resolve_model(name, places).path
        family = command.plugins.family_for(read_config(path)).name
    except SetupError as error:
        problem = error.message
    weight_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path else 0
    where = str(path) if path else None
    return ListedModel(name, source, where, weight_bytes, family, problem)


def _inspect_model(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, or any name that `serve` takes.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a checkpoint is and what it costs, without loading its weights."""
    command: CommandContext = context.obj
    settings = _settings(config)
    from darkbloom_core.checkpoint import Weights, read_config
    from darkbloom_core.cli._places import model_places
    from darkbloom_core.slots import current_device, resolve_model

    found = resolve_model(model, model_places(command, settings))
    try:
        checkpoint_config = read_config(found.path)
        device = current_device()
        description = command.plugins.family_for(checkpoint_config).describe(checkpoint_config, device)
    except UnsupportedCheckpoint as error:
        raise UnsupportedCheckpoint(f"{found.path}: {error.message}") from error
    facts = {
        "model": found.name,
        "path": str(found.path),
        "device": device.kind,
        **description_facts(description),
        "weight_bytes_on_disk": Weights(found.path).disk_bytes,
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for line in _lines(facts):
        typer.echo(line)


def _plan(
    context: typer.Context,
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Any names that `serve` takes.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what loading MODELs together, in this order, would give each: weights, KV memory, tokens."""
    command: CommandContext = context.obj
    settings = _settings(config)
    from darkbloom_core.cli._plan import print_plan

    print_plan(command, settings, models, as_json=as_json)


def description_facts(description: ModelDescription) -> dict[str, Any]:
    """What `models inspect --json` says of a description; bytes are those of the device described for."""
    return {
        "family": description.family,
        "model_type": description.model_type,
        "context_tokens": description.context_tokens,
        "vocab_size": description.vocab_size,
        "hidden_size": description.hidden_size,
        "modalities": sorted(description.modalities),
        "layers": layer_lines(description.layers),
        "kv_bytes_per_token": description.kv_bytes_per_token,
        "kv_bytes_at_full_context": description.kv_bytes(description.context_tokens),
        "kv_dtypes": sorted(description.kv_dtypes),
        "ignored_fields": list(description.ignored_fields),
        "notes": list(description.notes),
    }


def layer_lines(layers: Sequence[LayerKind]) -> list[str]:
    """One line for each kind of layer, in the order in which they first appear, with how many there are."""
    counts = Counter(_layer_text(layer) for layer in layers)
    return [f"{count} x {text}" for text, count in counts.items()]


def _layer_text(layer: LayerKind) -> str:
    if layer.state:
        shapes = ", ".join("x".join(map(str, shape)) for shape in layer.state)
        return f"recurrent, state {shapes}, {layer.dtype}"
    reach = "full attention" if layer.window is None else f"sliding attention over {layer.window}"
    if layer.source is not None:
        heads = f"{layer.q_heads} query heads, K and V of layer {layer.source}"
    else:
        dims = str(layer.k_dim) if layer.k_dim == layer.v_dim else f"{layer.k_dim} and {layer.v_dim}"
        heads = f"{layer.q_heads} query heads, {layer.kv_heads} KV heads x {dims}, {layer.dtype}"
    return ", ".join([reach, heads, *(["sinks"] if layer.sinks else [])])


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"{facts['model']}  ({facts['path']})"
    yield f"family            {facts['family']} (model_type {facts['model_type']})"
    yield f"reads             {', '.join(facts['modalities'])}"
    yield f"context           {count_text(facts['context_tokens'])} tokens"
    for index, layer in enumerate(facts["layers"]):
        yield f"{'layers' if index == 0 else '':<18}{layer}"
    yield f"KV cache          {count_text(facts['kv_bytes_per_token'])} bytes per token on {facts['device']}"
    yield f"                  {byte_text(facts['kv_bytes_at_full_context'])} for one sequence of full length"
    yield f"weights on disk   {byte_text(facts['weight_bytes_on_disk'])}"
    if facts["ignored_fields"]:
        yield f"ignored fields    {', '.join(facts['ignored_fields'])}"
    for note in facts["notes"]:
        yield f"note              {note}"
