"""Making engines as the settings say, and ending those that may hang."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from darkbloom_core.contracts import ChatCodec, LoadedModel
from darkbloom_core.engine import Engine, EngineOptions
from darkbloom_core.settings import EngineSettings, Settings
from darkbloom_core.slots._memory import SlotMemory

log = logging.getLogger(__name__)

STUCK_SECONDS = 5.0
"""How long a wedged engine's thread gets to end before it is left behind."""

UNLOAD_SECONDS = 60.0
"""How long any other engine's thread gets: twice what a healthy step may take."""


def engine_options(settings: EngineSettings, picture_bytes: int = 0) -> EngineOptions:
    """The settings table ``engine`` in the engine's own words."""
    choice = {"auto": None, "always": True, "never": False}
    return EngineOptions(
        max_rows=settings.max_rows,
        waiting_limit=settings.waiting_limit,
        chunk_tokens=settings.chunk_tokens,
        slice_seconds=settings.slice_milliseconds / 1000,
        event_buffer=settings.event_buffer,
        progress_seconds=settings.progress_seconds,
        deterministic=settings.deterministic,
        compiled=choice[settings.compile],
        fused=settings.compile == "always",
        chained=choice[settings.chain],
        packed=choice[settings.pack],
        picture_bytes=picture_bytes,
    )


class Engines:
    """Engines of slots, each with a share of ``memory``'s ledger."""

    def __init__(self, settings: Settings, memory: SlotMemory) -> None:
        self._settings = settings
        self._memory = memory

    def new(self, name: str, codec: ChatCodec, load: Callable[[], LoadedModel]) -> Engine:
        """An engine of the model ``name`` that has not begun to load."""
        options = replace(
            engine_options(self._settings.engine, self._settings.media.encoded_bytes),
            max_rows=self._settings.max_rows_of(name),
            most_arrays=self._settings.memory.live_arrays // self._settings.slots.max_models,
        )
        return Engine(name, codec, load, options, self._memory.new_share(name))

    def end(self, engine: Engine, weight_bytes: int, *, hangs: bool) -> None:
        """Close ``engine``; if its thread does not end, what it holds is counted until it returns."""
        if not engine.close(STUCK_SECONDS if hangs else UNLOAD_SECONDS):
            log.error("an engine's thread hangs in a step and was left behind with its memory")
            self._memory.left_behind.append((_thread_of(engine), weight_bytes + engine.slab_bytes))


def _thread_of(engine: Engine) -> Callable[[], bool]:
    """Whether the engine's thread still runs, without holding on to anything else of it."""
    return lambda: engine.alive
