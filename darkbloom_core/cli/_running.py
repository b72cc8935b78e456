"""Models loaded and an application over them: what every command that serves has in common.

Whatever happens inside the block, afterwards the models are unloaded and the sinks closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.applications import Starlette

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.cli._progress import loading_progress
from darkbloom_core.server import create_app
from darkbloom_core.settings import Settings
from darkbloom_core.slots import NamedCheckpoint, Slot, SlotManager
from darkbloom_core.telemetry import SinkEmitter


@contextmanager
def loaded_app(
    command: CommandContext, settings: Settings, models: Sequence[NamedCheckpoint]
) -> Iterator[tuple[Starlette, tuple[Slot, ...]]]:
    """Load ``models`` one after the other, showing progress on stderr, and put the application together."""
    plugins = command.plugins
    routes = plugins.server_routes(settings)
    emitter = SinkEmitter(plugins.telemetry_sinks(settings))
    slots = SlotManager(settings, plugins.family_for, emitter)
    try:
        loaded = []
        with loading_progress() as loading:
            for model in models:
                with loading(model.name) as report:
                    loaded.append(slots.load(model.name, model.path, report))
        for event in plugins.failure_events():
            emitter.emit(event)
        yield create_app(slots, settings, emitter, routes, plugins.report), tuple(loaded)
    finally:
        slots.close()
        emitter.close()
