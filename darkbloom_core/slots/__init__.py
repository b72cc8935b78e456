"""Load models, share memory among them, recover and unload them; find what a model's name means."""

from darkbloom_core.slots._blas import REFERENCE_BLAS, blas_name
from darkbloom_core.slots._capacity import SlotCapacity
from darkbloom_core.slots._defaults import sampling_defaults
from darkbloom_core.slots._device import current_device
from darkbloom_core.slots._digests import Digests
from darkbloom_core.slots._loading import KnownModel
from darkbloom_core.slots._manager import SlotManager
from darkbloom_core.slots._memory import memory_terms
from darkbloom_core.slots._plan import PlannedModel, check_checkpoint, plan_models
from darkbloom_core.slots._resolve import (
    ModelPlaces,
    NamedCheckpoint,
    hub_checkpoints,
    hub_folder,
    resolve_model,
    resolve_models,
)
from darkbloom_core.slots._slot import Slot
from darkbloom_core.slots._weights import estimated_weight_bytes

__all__ = [
    "REFERENCE_BLAS",
    "Digests",
    "KnownModel",
    "ModelPlaces",
    "NamedCheckpoint",
    "PlannedModel",
    "Slot",
    "SlotCapacity",
    "SlotManager",
    "blas_name",
    "check_checkpoint",
    "current_device",
    "estimated_weight_bytes",
    "hub_checkpoints",
    "hub_folder",
    "memory_terms",
    "plan_models",
    "resolve_model",
    "resolve_models",
    "sampling_defaults",
]
