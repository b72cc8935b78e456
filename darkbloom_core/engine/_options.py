"""How an engine runs, and how it stands: plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from darkbloom_core.contracts import CacheTier, TierStats
from darkbloom_core.engine._liveness import Wedge
from darkbloom_core.engine._warmup import Choices
from darkbloom_core.prefix import Numerics, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine runs; the settings table ``engine`` in the engine's own words.

    ``compiled``, ``chained`` and ``packed`` are chosen at warm-up where they are None.
    ``fused``: compiled decode steps are fused on the CPU backend, too, where each fused kernel's
    first use runs a C++ compiler for a second or more; where MLX cannot do otherwise and
    ``compiled`` is None, decode steps are not compiled there.
    ``picture_bytes`` of pictures that the model has seen are kept.
    ``most_arrays`` bounds the arrays of rows and caches together.
    """

    max_rows: int = 8
    waiting_limit: int = 64
    chunk_tokens: int = 256
    slice_seconds: float = 0.05
    event_buffer: int = 256
    progress_seconds: float = 120.0
    deterministic: bool = False
    compiled: bool | None = None
    fused: bool = False
    chained: bool | None = None
    packed: bool | None = None
    picture_bytes: int = 0
    most_arrays: int = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """How an engine reuses the KV of prompts' beginnings.

    ``numerics`` has the engine's own layers and chunk grid. ``secret`` tells scopes apart.
    ``ram_bytes`` bounds the RAM tier; None means a part of the grant. ``relaxed`` reuses KV
    that decoding computed, too, and up to any block. ``open_tiers`` gives the tiers below
    RAM, fastest first, by name; the engine closes them.
    """

    numerics: Numerics
    secret: bytes
    ram_bytes: int | None = None
    relaxed: bool = False
    open_tiers: Callable[[], Mapping[str, CacheTier]] = dict


LookupOutcome: TypeAlias = Reason | Literal["failed"]
"""What came of a look-up; ``failed``: what was planned did not come, or came too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStatus:
    """Prefix reuse since the engine was built. ``waits`` counts requests that waited for another's prefill.

    ``outcomes`` has one count for each request that was looked up. ``tiers`` and ``faults``
    are by place, ``ram`` first. ``reserved_bytes`` of the model's share are for the RAM tier.
    ``parts_unoffered`` were not offered to the tiers below RAM, because too many waited or
    there was no memory for a copy.
    """

    outcomes: Mapping[LookupOutcome, int]
    tokens_reused: int
    waits: int
    parts_unoffered: int
    tiers: Mapping[str, TierStats]
    faults: Mapping[str, int]
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """How an engine stands. Counters run since it was built; bytes are of rows' KV.

    ``failed``: its thread ended with an error, and nothing is served any more.
    ``live_arrays`` are those that rows and caches hold. ``max_rows`` is how many sequences
    it can run at once. ``committed_tokens`` is the worst case, prompt + ``max_tokens``, of all
    that run or wait; ``active_tokens`` what those that run hold now. The two rates are tokens
    per second, smoothed; None until one is known.
    """

    running: int
    waiting: int
    max_rows: int
    active_tokens: int
    committed_tokens: int
    prefill_rate: float | None
    decode_rate: float | None
    kv_bytes_used: int
    kv_bytes_reserved: int
    kv_bytes_grant: int
    live_arrays: int
    steps: int
    decode_steps: int
    prefill_tokens: int
    output_tokens: int
    largest_batch: int
    draining: bool
    healthy: bool
    failed: bool
    wedge: Wedge
    choices: Choices | None
    prefix: PrefixStatus | None
