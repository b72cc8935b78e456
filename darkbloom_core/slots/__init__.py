"""Load models, share memory among them, recover and unload them; find what a model's name means."""

from darkbloom_core.slots._defaults import sampling_defaults
from darkbloom_core.slots._device import current_device
from darkbloom_core.slots._manager import SlotManager
from darkbloom_core.slots._resolve import (
    ModelPlaces,
    NamedCheckpoint,
    hub_checkpoints,
    hub_folder,
    resolve_model,
    resolve_models,
)
from darkbloom_core.slots._slot import Slot

__all__ = [
    "ModelPlaces",
    "NamedCheckpoint",
    "Slot",
    "SlotManager",
    "current_device",
    "hub_checkpoints",
    "hub_folder",
    "resolve_model",
    "resolve_models",
    "sampling_defaults",
]
