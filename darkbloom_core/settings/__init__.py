"""Settings from one TOML file and ``DARKBLOOM_*`` environment variables."""

from darkbloom_core.settings._model import (
    EngineSettings,
    MemorySettings,
    ServerSettings,
    Settings,
    TelemetrySettings,
)

__all__ = ["EngineSettings", "MemorySettings", "ServerSettings", "Settings", "TelemetrySettings"]
