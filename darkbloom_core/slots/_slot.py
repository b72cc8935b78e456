"""A slot: one loaded model with its codec, its defaults and its engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from darkbloom_core.contracts import ChatCodec, ModelDescription, SlotState
from darkbloom_core.engine import Engine, SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """``state`` changes over the slot's life; everything else is fixed once it exists."""

    name: str
    path: Path
    description: ModelDescription
    codec: ChatCodec
    defaults: SamplingParams
    engine: Engine
    weight_bytes: int = 0
    state: SlotState = "loading"
    state_since: float = field(default_factory=time.monotonic)
    created_unix_seconds: int = field(default_factory=lambda: int(time.time()))
