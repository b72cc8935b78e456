"""What a word names, read from config, tokenizer and the headers of the weights: no weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from darkbloom_core.checkpoint import Weights, read_config
from darkbloom_core.cli._context import CommandContext
from darkbloom_core.contracts import Device, ModelDescription
from darkbloom_core.errors import UnsupportedCheckpoint
from darkbloom_core.slots import ModelPlaces, resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A checkpoint that could be loaded, if there is room."""

    name: str
    path: Path
    description: ModelDescription
    disk_bytes: int


def examine(command: CommandContext, word: str, places: ModelPlaces, device: Device) -> Examined:
    """Find and check what ``word`` names. Raises the ``SetupError`` that loading it would raise."""
    found = resolve_model(word, places)
    config = read_config(found.path)
    try:
        family = command.plugins.family_for(config)
        description = family.describe(config, device)
    except UnsupportedCheckpoint as error:
        raise UnsupportedCheckpoint(f"{found.path}: {error.message}") from error
    disk_bytes = Weights(found.path).disk_bytes
    family.codec(found.path, description)
    return Examined(name=found.name, path=found.path, description=description, disk_bytes=disk_bytes)
