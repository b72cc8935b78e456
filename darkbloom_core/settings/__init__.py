"""Settings from one TOML file and ``DARKBLOOM_*`` environment variables."""

from darkbloom_core.settings._environment import RESERVED, variable_name
from darkbloom_core.settings._folders import state_folder, tier_folder
from darkbloom_core.settings._load import DEFAULT_CONFIG, load_settings
from darkbloom_core.settings._model import (
    EngineSettings,
    MediaSettings,
    MemorySettings,
    PrefixSettings,
    ServerSettings,
    Settings,
    SlotSettings,
    TelemetrySettings,
)

__all__ = [
    "DEFAULT_CONFIG",
    "RESERVED",
    "EngineSettings",
    "MediaSettings",
    "MemorySettings",
    "PrefixSettings",
    "ServerSettings",
    "Settings",
    "SlotSettings",
    "TelemetrySettings",
    "load_settings",
    "state_folder",
    "tier_folder",
    "variable_name",
]
