"""The command line: serve, chat, models, plugins, and whatever plugins add."""

from darkbloom_core.cli._main import main

__all__ = ["main"]
