"""Continuous batching of one model: sequences, scheduler, admission, KV rows, attention, sampling, text, step loop."""

from darkbloom_core.engine._build import planned_slab_bytes
from darkbloom_core.engine._engine import Engine
from darkbloom_core.engine._kv import KvStore, Row, lane_bytes, row_bytes
from darkbloom_core.engine._options import (
    EngineOptions,
    EngineStatus,
    LookupOutcome,
    PrefixOptions,
    PrefixStatus,
)
from darkbloom_core.engine._request import (
    GenerationRequest,
    OutputDelta,
    OutputEnd,
    OutputEvent,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
)
from darkbloom_core.engine._steps import step_batch
from darkbloom_core.engine._stream import OutputStream
from darkbloom_core.engine._text import PlainParser, TextPipeline

__all__ = [
    "Engine",
    "EngineOptions",
    "EngineStatus",
    "GenerationRequest",
    "KvStore",
    "LookupOutcome",
    "OutputDelta",
    "OutputEnd",
    "OutputEvent",
    "OutputStream",
    "PlainParser",
    "PrefixOptions",
    "PrefixStatus",
    "Row",
    "SamplingParams",
    "TextPipeline",
    "Timings",
    "TokenLogprob",
    "Usage",
    "lane_bytes",
    "planned_slab_bytes",
    "row_bytes",
    "step_batch",
]
