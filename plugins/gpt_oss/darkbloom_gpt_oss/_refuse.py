"""The one way in which a config is refused: by the name of the field at fault."""

from __future__ import annotations

from darkbloom_core.errors import UnsupportedCheckpoint


def refused(field: str, what: str) -> UnsupportedCheckpoint:
    """The error to raise for ``field`` of ``config.json``."""
    return UnsupportedCheckpoint(f"config.json: {field}: {what}")
