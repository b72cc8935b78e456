"""Where this process looks for models, and on which device it would run them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.contracts import Device
from darkbloom_core.errors import SetupError
from darkbloom_core.slots import ModelPlaces, hub_folder

if TYPE_CHECKING:
    from darkbloom_core.settings import Settings


def model_places(command: CommandContext, settings: Settings) -> ModelPlaces:
    """The settings' aliases, the plugins' checkpoints and the hub's cache."""
    return ModelPlaces(
        hub=hub_folder(os.environ), aliases=settings.models, offered=command.plugins.checkpoints()
    )


def current_device() -> Device:
    """The device that MLX computes on. Raises ``SetupError`` saying what to install if it has no backend."""
    try:
        import mlx.core as mx
    except ImportError as error:
        raise SetupError(
            f"MLX cannot be imported ({error}). On Linux it needs a backend: pip install 'darkbloom[cpu]' "
            "(or [cuda12], [cuda13] for an NVIDIA GPU)"
        ) from error
    if mx.metal.is_available():
        return Device("metal")
    return Device("cuda" if mx.default_device() == mx.Device(mx.gpu) else "cpu")
