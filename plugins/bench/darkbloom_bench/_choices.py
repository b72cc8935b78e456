"""What the commands of the group have in common: which model, from which settings, and what they say. Light."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from darkbloom_core.cli import CommandContext
from darkbloom_core.errors import SettingsError

if TYPE_CHECKING:
    from darkbloom_bench._subject import Subject
    from darkbloom_core.settings import Settings

ModelName: TypeAlias = Annotated[
    str | None, typer.Option("--model", help="A checkpoint: any name that `serve` takes.")
]
Shape: TypeAlias = Annotated[
    str | None, typer.Option("--shape", help="Random weights in a published model's true shape.")
]
RandomShape: TypeAlias = Annotated[
    Path | None,
    typer.Option("--random", help="Random weights in the shape of this config.json.", dir_okay=False),
]
Config: TypeAlias = Annotated[
    Path | None, typer.Option("--config", help="Settings file.", show_default=False, dir_okay=False)
]

Against: TypeAlias = Annotated[str | None, typer.Option("--against", help="A peer: mlx-lm.")]
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", help="Write what was found to this file, as a list.", dir_okay=False)
]

PEERS = ("mlx-lm",)


def check_peer(against: str | None) -> None:
    """Raises ``SettingsError`` for a peer that there is not."""
    if against is not None and against not in PEERS:
        raise SettingsError(f"no peer {against!r}: there is {', '.join(PEERS)}")


def choose_subject(
    command: CommandContext, config: Path | None, model: str | None, shape: str | None, random: Path | None
) -> tuple[Settings, Subject]:
    """The settings, and the one subject that was named. Raises ``SettingsError`` if none or several were."""
    from darkbloom_bench._subject import checkpoint_subject, config_subject, shape_subject
    from darkbloom_core.settings import load_settings
    from darkbloom_core.slots import ModelPlaces, current_device, hub_folder

    settings, device = load_settings(config), current_device()
    if sum(each is not None for each in (model, shape, random)) != 1:
        raise SettingsError("say one of --model, --shape and --random")
    plugins = command.plugins
    if shape is not None:
        return settings, shape_subject(shape, plugins, device)
    if random is not None:
        return settings, config_subject(random, plugins, device)
    assert model is not None
    places = ModelPlaces(hub=hub_folder(os.environ), aliases=settings.models, offered=plugins.checkpoints())
    return settings, checkpoint_subject(model, places, plugins, device)


def say(text: str) -> None:
    """Progress."""
    typer.echo(text, err=True)


def settle() -> None:
    """Give back what the last run left behind: garbage, and MLX's cache of buffers."""
    import gc

    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
