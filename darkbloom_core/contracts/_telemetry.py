"""The closed list of events that leave the core. No field holds text, a token, a hash or a tenant.

Durations are seconds of a monotonic clock; ``started_unix_nanoseconds`` is wall time. An
event is emitted at a load, at the end of a request and by timers, never per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "cancelled", "error"]
MediaKind: TypeAlias = Literal["image", "video", "mixed"]
SlotState: TypeAlias = Literal["loading", "warming", "serving", "reloading", "unloading", "failed", "absent"]
SlotActivity: TypeAlias = Literal["idle", "running", "crashed", "reloading"]
"""A slot in one word, as a fleet's heartbeat says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted:
    """A request was accepted at the API."""

    model: str
    operation: Literal["chat", "text_completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request ended, in whatever way. Emitted exactly once for each ``RequestStarted``."""

    model: str
    operation: Literal["chat", "text_completion"]
    request_id: str
    trace_parent: str | None
    started_unix_nanoseconds: int
    duration_seconds: float
    status: int
    error_code: str | None
    finish_reasons: tuple[FinishReason, ...]
    streamed: bool
    choices: int = 1
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    malformed_outputs: int = 0
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    time_to_first_token_seconds: float | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused:
    """A request was refused before it was accepted (bad body, unknown model, wrong key).

    ``media_kind`` says what it wanted the model to see, None if nothing or if nobody had read that far.
    """

    status: int
    error_code: str
    media_kind: MediaKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChanged:
    """A slot went into another state. ``seconds`` is how long the state before it lasted."""

    model: str
    family: str
    state: SlotState
    seconds: float
    error_code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """How one engine stands, sampled by a timer. Counters run since the engine was built."""

    model: str
    activity: SlotActivity
    running: int
    waiting: int
    kv_bytes_used: int
    kv_bytes_reserved: int
    kv_bytes_grant: int
    live_arrays: int
    decode_steps: int
    prefill_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSample:
    """How one engine reused the beginnings of prompts, sampled like ``EngineSample``.

    Each request that was looked up is a hit or has one of the reasons of a miss. ``waits``
    are requests that waited for what another was computing. ``parts_unoffered`` were not
    offered to the tiers below memory, because too many waited or there was no memory for a copy.
    """

    model: str
    lookups: int
    hits: int
    tokens_reused: int
    waits: int
    parts_unoffered: int
    missed_short: int
    missed_absent: int
    missed_window: int
    missed_cost: int
    missed_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSample:
    """One tier of an engine's prefix cache: ``ram``, or one of a plugin. Bytes are those held now."""

    model: str
    tier: str
    parts: int
    bytes_used: int
    bytes_limit: int
    full_bytes: int
    window_bytes: int
    state_bytes: int
    hits: int
    misses: int
    offered: int
    dropped: int
    evicted: int
    damaged: int
    faults: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsFetched:
    """A cache tier below RAM has answered for a prompt's parts. ``size_bytes`` are of those that came."""

    model: str
    tier: str
    started_unix_nanoseconds: int
    duration_seconds: float
    parts: int
    parts_missing: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsWritten:
    """A cache tier has written all that waited for it, and rests."""

    model: str
    tier: str
    started_unix_nanoseconds: int
    duration_seconds: float
    parts: int
    parts_dropped: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStuck:
    """Every reservation of memory has failed for a while; at most one event a minute.

    Bytes are of the accelerator's memory, or of the machine's where both are one.
    """

    streak_seconds: float
    reservations: int
    reserved_bytes: int
    used_bytes: int
    cached_bytes: int
    system_free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationDropped:
    """A stuck ledger has dropped a reservation that no owner knows of."""

    kind: Literal["kv", "load", "media", "blocks"]
    age_seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFailed:
    """A plugin was refused or broke while loading."""

    plugin: str
    distribution: str | None
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailed:
    """Another sink raised; one event for each time."""

    sink: str


Event: TypeAlias = (
    RequestStarted
    | RequestFinished
    | RequestRefused
    | SlotChanged
    | EngineSample
    | PrefixSample
    | TierSample
    | PartsFetched
    | PartsWritten
    | LedgerStuck
    | ReservationDropped
    | PluginFailed
    | SinkFailed
)

EVENT_TYPES: tuple[type, ...] = (
    RequestStarted,
    RequestFinished,
    RequestRefused,
    SlotChanged,
    EngineSample,
    PrefixSample,
    TierSample,
    PartsFetched,
    PartsWritten,
    LedgerStuck,
    ReservationDropped,
    PluginFailed,
    SinkFailed,
)


class TelemetrySink(Protocol):
    """Where events go. It may be called from any thread and should return at once."""

    @property
    def name(self) -> str: ...

    def emit(self, event: Event) -> None:
        """Take one event. If this raises, the core counts it, logs it once and goes on."""
        ...

    def close(self) -> None:
        """Flush; called once when the process ends."""
        ...


class Emitter(Protocol):
    """What rooms of the core are handed to emit events with. Never raises."""

    def emit(self, event: Event) -> None: ...
