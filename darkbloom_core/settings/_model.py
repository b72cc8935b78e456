"""Every setting, its default and its meaning. Sizes are bytes, times are seconds.

The text under a setting is its documentation: docs/settings.md is made from this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr
from pydantic_core import PydanticCustomError

T = TypeVar("T")

GIB = 1024**3
MIB = 1024**2


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def _as_browsers_write_it(origin: str) -> str:
    if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+", origin):
        raise PydanticCustomError(
            "origin", "be an origin as browsers write it, such as https://chat.example.org, or *"
        )
    return origin


Origin: TypeAlias = Annotated[str, AfterValidator(_as_browsers_write_it)]


class ServerSettings(_Table):
    """The HTTP server."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """The address to listen on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on; 0 takes a free one."""

    body_bytes_limit: int = Field(default=32 * MIB, ge=1024)
    """The longest request body that is read, in bytes."""

    drain_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """How long running requests may go on after a shutdown was asked for."""

    key_file: str | None = Field(default=None, min_length=1)
    """A file of API keys, on each line a name, a space and a key; requests then need one ([security.md](security.md#api-keys))."""

    key_concurrency: int = Field(default=0, ge=0)
    """How many requests of one API key may be answered at once; more are refused with 429. 0 means any number."""

    key_requests_per_minute: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How often one API key may ask, over a longer time; more is refused with 429. 0 means as often as it likes."""

    key_burst: int = Field(default=10, ge=1)
    """How many requests of one API key may come at once before `key_requests_per_minute` holds them back."""

    cors_origins: tuple[Origin, ...] = Field(default=(), strict=False)  # TOML has arrays, not tuples
    """The origins whose pages may read answers, such as `https://chat.example.org`; `*` is all, and none unless named here."""

    route_plugins: tuple[str, ...] = Field(default=(), strict=False)  # TOML has arrays, not tuples
    """The plugins whose HTTP routes are served, by name; none unless named here."""


MostRows: TypeAlias = Annotated[int, Field(ge=1, le=256, strict=False)]  # a variable is text

Choice: TypeAlias = Literal["auto", "always", "never"]


class EngineSettings(_Table):
    """The engine of every model."""

    max_rows: int = Field(default=8, ge=1, le=256)
    """How many sequences run at once."""

    waiting_limit: int = Field(default=64, ge=0)
    """How many more may wait; beyond that a request is refused with 429."""

    chunk_tokens: int = Field(default=256, ge=16)
    """The prefill grid: prompts are cut into chunks of this many tokens."""

    slice_milliseconds: float = Field(default=50.0, gt=0, allow_inf_nan=False)
    """How long a slice of prefill may keep the running sequences waiting."""

    default_max_tokens: int = Field(default=8192, ge=1)
    """The most output tokens of a request that does not say how many it wants."""

    event_buffer: int = Field(default=256, ge=2)
    """How many output events of one sequence may wait for a slow reader."""

    progress_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """How long a request may wait, or stand still, before it ends with 504; every bit of progress starts anew."""

    deterministic: bool = False
    """Whether a request's bits must not depend on what runs beside it; decoding then costs more."""

    compile: Choice = "auto"
    """Whether decode steps are compiled; "auto" measures at warm-up, on a CPU for single rows alone, and only "always" fuses there."""

    chain: Choice = "auto"
    """Whether a decode step is launched while the one before still runs; "auto" measures at warm-up."""

    pack: Choice = "auto"
    """Whether short prompts are prefilled together; "auto" measures at warm-up."""


class MemorySettings(_Table):
    """The one memory cap over all models."""

    reserve_bytes: int = Field(default=0, ge=0)
    """Bytes to leave to other programs, if that is more than the cap leaves anyway."""

    kv_bytes: int | None = Field(default=None, ge=1)
    """KV memory of all models together in bytes; computed from the machine if it is not set."""

    cap_fraction: float = 0.9
    """The share of memory that all models together may use; more than 1 means 1, and 0 and less mean 0.9."""

    activation_bytes: int = 0
    """Bytes to keep free for activations; 0 and less mean 3 GiB, and less on small machines."""

    physical_bytes: int | None = Field(default=None, ge=1)
    """How much memory the machine is taken to have, at most what it has; to try what a smaller one would do."""

    live_arrays: int = Field(default=400_000, ge=0)
    """The most arrays that requests and caches may hold, divided evenly among `slots.max_models`; Metal allows 499,000."""


class SlotSettings(_Table):
    """Which models are in memory."""

    max_models: int = Field(default=8, ge=1)
    """How many models may be in memory at once; for one more, the one that is idle for longest is unloaded."""

    idle_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """After how long without a request a model is unloaded; the next request loads it again. 0 means never."""

    preload: tuple[str, ...] = Field(default=(), strict=False)  # TOML has arrays, not tuples
    """The models to load at the start, in this order; others are loaded when asked for. None named: all at the start."""


class PrefixSettings(_Table):
    """Reuse of what was computed for the beginnings of earlier prompts."""

    reuse: Literal["off", "exact", "relaxed"] = "exact"
    """"exact" changes no bit of any answer; "relaxed" also reuses what was computed while decoding, and up to any block."""

    ram_bytes: int | None = Field(default=None, ge=0)
    """The most memory that a model's cache may have, as a part of its KV memory; a quarter of that if it is not set."""

    tiers: tuple[str, ...] = Field(default=(), strict=False)  # TOML has arrays, not tuples
    """Cache tiers of plugins below memory, by name, the fastest first; none unless named here."""

    tier_bytes: int | None = Field(default=None, ge=0)
    """The most bytes that a tier may hold of all models together; the tier's own choice if it is not set."""

    state_folder: str | None = None
    """Where tiers and what belongs to them are kept; `darkbloom` in `$XDG_STATE_HOME` or `~/.local/state` if not set."""


class MediaSettings(_Table):
    """Pictures and videos in requests."""

    part_bytes: int = Field(default=25 * MIB, ge=1)
    """The largest picture or video, as bytes of its file."""

    image_pixels: int = Field(default=100_000_000, ge=1)
    """The most pixels of one picture, and of one frame of a video."""

    request_image_pixels: int = Field(default=384_000_000, ge=1)
    """The most pixels of all pictures of one request together."""

    image_frames: int = Field(default=4096, ge=1)
    """The most frames of an animated picture, of which only the first one is looked at."""

    videos: int = Field(default=8, ge=0)
    """The most videos in one request."""

    video_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """The longest video."""

    sampled_frames: int = Field(default=32, ge=1)
    """The most frames that are taken of one video, or fewer if the model is made for fewer."""

    video_frame_pixels: int = Field(default=384_000_000, ge=1)
    """The most pixels of all frames that are taken of one request's videos together."""

    decode_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """How long reading all pictures and videos of one request may take, once it has begun."""

    workers: int | None = Field(default=None, ge=1, le=64)
    """How many requests' pictures and videos are read at once. Unset: two, or one where there are not more than two cores."""

    waiting_limit: int = Field(default=64, ge=0)
    """How many more may wait for it; beyond that a request is refused with 429."""

    encoded_bytes: int = Field(default=256 * MIB, ge=0)
    """How many bytes of pictures that a model has seen are kept for the next request with the same one; 0 for none."""


class TelemetrySettings(_Table):
    """Events for telemetry plugins."""

    sample_seconds: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """How often engines are sampled; 0 turns sampling off."""


class Settings(_Table):
    """All settings, as they are after the file and the environment were read."""

    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    memory: MemorySettings = MemorySettings()
    slots: SlotSettings = SlotSettings()
    prefix: PrefixSettings = PrefixSettings()
    media: MediaSettings = MediaSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    models: dict[str, str] = Field(default_factory=dict)
    """A name to serve a model under, and its folder or another word that names it."""

    max_rows: dict[str, MostRows] = Field(default_factory=dict)
    """The name that a model is served under, and how many sequences of it run at once, in place of `engine.max_rows`."""

    keys: dict[str, SecretStr] = Field(default_factory=dict)
    """An API key and whose it is, beside those of `server.key_file`; never in the settings file."""

    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """A table of its own for each plugin, under the plugin's name; the plugin says what may stand in it."""

    def options_of(self, plugin: str) -> dict[str, Any]:
        """The options of ``plugin``, empty if there are none; ``-`` and ``_`` in its name are the same."""
        return _of(self.options, plugin, {})

    def max_rows_of(self, model: str) -> int:
        """How many sequences of ``model`` run at once; ``-`` and ``_`` in its name are the same."""
        return _of(self.max_rows, model, self.engine.max_rows)


def _of(table: Mapping[str, T], name: str, default: T) -> T:
    """What stands in ``table`` under ``name``, the same name with ``_`` for ``-`` if not itself, else ``default``."""
    alike = {key.replace("_", "-"): value for key, value in table.items()}
    return table.get(name, alike.get(name.replace("_", "-"), default))
