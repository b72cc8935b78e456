"""A slot: one loaded model with its codec, its defaults and its engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from darkbloom_core.contracts import ChatCodec, ModelDescription, SlotActivity, SlotState
from darkbloom_core.engine import Engine, PrefixOptions, SamplingParams
from darkbloom_core.grammar import GrammarCompiler
from darkbloom_core.memory import KvDemand


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """One model's place in memory.

    ``state``, ``engine`` (when it is rebuilt) and the figures of memory change over the
    slot's life, by the manager alone; everything else is fixed once it exists. ``pins``
    counts the requests that use the slot, ``used_at`` is when the last one came or went.
    ``load_seconds`` covers weights, sizing and the engine's warm-up. ``prefix`` is how its
    engine reuses prompts' beginnings, None if it does not.
    """

    name: str
    path: Path
    description: ModelDescription
    codec: ChatCodec
    defaults: SamplingParams
    engine: Engine
    weight_bytes: int = 0
    activation_bytes: int = 0
    grant_bytes: int = 0
    load_seconds: float | None = None
    prefix: PrefixOptions | None = None
    pins: int = 0
    recovered_at: float | None = None
    state: SlotState = "loading"
    state_since: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    created_unix_seconds: int = field(default_factory=lambda: int(time.time()))
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.codec)

    @property
    def demand(self) -> KvDemand:
        """What its KV costs, for the division of KV memory."""
        return KvDemand(
            self.description.kv_bytes_per_token, self.description.context_tokens, self.weight_bytes
        )

    @property
    def slab_bytes(self) -> int:
        """The part of the grant that is allocated whatever runs."""
        return self.engine.slab_bytes

    @property
    def is_idle(self) -> bool:
        """Whether it serves, but nobody uses it."""
        if self.state != "serving" or self.pins > 0:
            return False
        status = self.engine.status()
        return status.running + status.waiting == 0

    @property
    def activity(self) -> SlotActivity:
        """The slot in one word, as a fleet's heartbeat says it."""
        if self.state == "reloading":
            return "reloading"
        status = self.engine.status()
        if self.state == "failed" or not status.healthy or status.wedge != "none":
            return "crashed"
        return "running" if status.running + status.waiting > 0 else "idle"
