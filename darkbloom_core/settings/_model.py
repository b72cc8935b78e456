"""Every setting, its default and its meaning. Sizes are bytes, times are seconds."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

GIB = 1024**3
MIB = 1024**2


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(_Table):
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    body_bytes_limit: int = Field(32 * MIB, ge=1024)
    drain_seconds: float = Field(30.0, ge=0)
    route_plugins: tuple[str, ...] = ()


class EngineSettings(_Table):
    """The engine of every model. ``chunk_tokens`` is the prefill grid."""

    max_rows: int = Field(8, ge=1, le=256)
    waiting_limit: int = Field(64, ge=0)
    chunk_tokens: int = Field(256, ge=16)
    slice_milliseconds: float = Field(50.0, gt=0)
    default_max_tokens: int = Field(8192, ge=1)
    event_buffer: int = Field(256, ge=2)


class MemorySettings(_Table):
    """The one cap over all models. ``kv_bytes`` sets a model's KV grant instead of computing it."""

    reserve_bytes: int = Field(0, ge=0)
    kv_bytes: int | None = Field(None, ge=1)


class TelemetrySettings(_Table):
    """``sample_seconds`` is how often engines are sampled; 0 turns sampling off."""

    sample_seconds: float = Field(10.0, ge=0)


class Settings(_Table):
    """All settings. ``models`` maps an alias to a path; ``options`` maps a plugin's name to its own table."""

    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    memory: MemorySettings = MemorySettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    models: dict[str, str] = Field(default_factory=dict)
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
