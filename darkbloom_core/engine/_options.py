"""How an engine runs, and how it stands: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from darkbloom_core.engine._liveness import Wedge
from darkbloom_core.engine._warmup import Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine runs; the settings table ``engine`` in the engine's own words.

    ``compiled``, ``chained`` and ``packed`` are chosen at warm-up where they are None;
    on the CPU backend None means not compiled, since the first compilation there runs a C++
    compiler for many seconds.
    """

    max_rows: int = 8
    waiting_limit: int = 64
    chunk_tokens: int = 256
    slice_seconds: float = 0.05
    event_buffer: int = 256
    progress_seconds: float = 120.0
    deterministic: bool = False
    compiled: bool | None = None
    chained: bool | None = None
    packed: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """How an engine stands. Counters run since it was built; bytes are of KV.

    ``max_rows`` is how many sequences it can run at once. ``committed_tokens`` is the worst
    case, prompt + ``max_tokens``, of all that run or wait; ``active_tokens`` what those that
    run hold now. The two rates are tokens per second, smoothed; None until one is known.
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
    steps: int
    decode_steps: int
    prefill_tokens: int
    output_tokens: int
    largest_batch: int
    draining: bool
    healthy: bool
    wedge: Wedge
    choices: Choices | None
