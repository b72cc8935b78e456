"""Models loaded and an application over them: what every command that serves has in common.

Whatever happens inside the block, afterwards the models are unloaded and the sinks closed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.applications import Starlette

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.cli._progress import loading_progress
from darkbloom_core.errors import CapacityExhausted, SettingsError
from darkbloom_core.server import create_app
from darkbloom_core.settings import Settings
from darkbloom_core.slots import NamedCheckpoint, Slot, SlotManager
from darkbloom_core.telemetry import SinkEmitter

log = logging.getLogger(__name__)


@contextmanager
def loaded_app(
    command: CommandContext, settings: Settings, models: Sequence[NamedCheckpoint]
) -> Iterator[tuple[Starlette, tuple[Slot, ...]]]:
    """Load ``models`` one after the other, showing progress on stderr, and put the application together.

    ``slots.preload`` of the settings may say which of them, and in which order; the others
    are loaded when somebody asks for them. So is a model for which there is no room beside
    those before it; only the first must fit. Yields the application and what is loaded.
    """
    plugins = command.plugins
    routes = plugins.server_routes(settings)
    emitter = SinkEmitter(plugins.telemetry_sinks(settings))
    tiers = plugins.cache_tiers() if settings.prefix.tiers else ()
    slots = SlotManager(settings, plugins.family_for, emitter, cache_tiers=tiers)
    try:
        for model in models:
            slots.add(model.name, model.path)
        loaded: list[Slot] = []
        with loading_progress() as loading:
            for model in _preloaded(models, settings.slots.preload):
                with loading(model.name) as report:
                    try:
                        loaded.append(slots.load(model.name, model.path, report))
                    except CapacityExhausted as error:
                        if not loaded:
                            raise
                        log.warning("%s will be loaded when it is asked for: %s", model.name, error.message)
        for event in plugins.failure_events():
            emitter.emit(event)
        yield create_app(slots, settings, emitter, routes, plugins.report), tuple(loaded)
    finally:
        slots.close()
        emitter.close()


def _preloaded(models: Sequence[NamedCheckpoint], names: Sequence[str]) -> Sequence[NamedCheckpoint]:
    """Those of ``models`` to load at the start; all without ``names``. Raises ``SettingsError`` for another name."""
    if not names:
        return models
    by_name = {model.name: model for model in models}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SettingsError(
            f"slots.preload: {', '.join(unknown)} is not among the models to serve ({', '.join(by_name)})"
        )
    return [by_name[name] for name in names]
