"""Where this process looks for models. Importing this imports MLX, so it checks first that MLX can run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.slots import ModelPlaces, hub_folder

if TYPE_CHECKING:
    from darkbloom_core.settings import Settings


def model_places(command: CommandContext, settings: Settings) -> ModelPlaces:
    """The settings' aliases, the plugins' checkpoints and the hub's cache."""
    return ModelPlaces(
        hub=hub_folder(os.environ), aliases=settings.models, offered=command.plugins.checkpoints()
    )
