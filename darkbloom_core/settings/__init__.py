"""Settings from one TOML file and ``DARKBLOOM_*`` environment variables; the API keys that they name."""

from darkbloom_core.settings._environment import RESERVED, variable_name
from darkbloom_core.settings._folders import state_folder, tier_folder
from darkbloom_core.settings._keys import ApiKey, read_keys, require_key
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
    "ApiKey",
    "EngineSettings",
    "MediaSettings",
    "MemorySettings",
    "PrefixSettings",
    "ServerSettings",
    "Settings",
    "SlotSettings",
    "TelemetrySettings",
    "load_settings",
    "read_keys",
    "require_key",
    "state_folder",
    "tier_folder",
    "variable_name",
]
