"""Which checkpoints a command serves: those named, and with ``--demo`` those of the demo that can be read here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from darkbloom_core.checkpoint import read_config
from darkbloom_core.cli._context import CommandContext
from darkbloom_core.cli._places import model_places
from darkbloom_core.errors import SetupError, UnsupportedCheckpoint
from darkbloom_core.slots import NamedCheckpoint, resolve_models

if TYPE_CHECKING:
    from darkbloom_core.settings import Settings

DEMO_PREFIX = "demo/"

logger = logging.getLogger("darkbloom.cli")


def choose_models(
    command: CommandContext, words: Sequence[str], settings: Settings, *, demo: bool
) -> tuple[NamedCheckpoint, ...]:
    """Resolve ``words`` and add the demo's checkpoints; each has an installed family. No weights are read.

    A demo checkpoint without a family is left out with a warning that says what to install;
    a named one raises ``UnsupportedCheckpoint`` with that. Raises ``SetupError`` if nothing is left.
    """
    places = model_places(command, settings)
    chosen = list(resolve_models(words, places))
    for model in chosen:
        if problem := _problem(command, model):
            raise UnsupportedCheckpoint(problem)
    names = {model.name for model in chosen}
    offered = [NamedCheckpoint(*item) for item in places.offered.items() if item[0].startswith(DEMO_PREFIX)]
    for model in offered if demo else ():
        if model.name in names:
            continue
        if problem := _problem(command, model):
            logger.warning("leaving out %s", problem)
        else:
            chosen.append(model)
    if chosen:
        return tuple(chosen)
    if not demo:
        raise SetupError("name a model, or use --demo; `darkbloom models list` shows what can be named here")
    if not offered:
        raise SetupError("no plugin brings a demo checkpoint: pip install darkbloom-demo")
    raise SetupError("no family for any of the demo checkpoints is installed")


def _problem(command: CommandContext, model: NamedCheckpoint) -> str | None:
    """Why no installed family reads ``model``, and what to install; None if one does."""
    try:
        command.plugins.family_for(read_config(model.path))
    except UnsupportedCheckpoint as error:
        return f"{model.name}: {error.message}"
    return None
