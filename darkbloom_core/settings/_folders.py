"""Where state is kept that should outlive the process."""

from __future__ import annotations

import os
from pathlib import Path

from darkbloom_core.settings._model import Settings


def state_folder(settings: Settings) -> Path:
    """``prefix.state_folder``, else the user's state folder."""
    if settings.prefix.state_folder is not None:
        return Path(settings.prefix.state_folder).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "darkbloom"


def tier_folder(settings: Settings, tier: str) -> Path:
    """The folder of a cache tier, the same for all models and processes. It may not exist yet."""
    return state_folder(settings) / "tiers" / tier
