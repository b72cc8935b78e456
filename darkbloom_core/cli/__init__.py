"""The command line: serve, chat, models, plugins, and whatever plugins add.

A plugin's command finds a ``CommandContext`` in ``typer.Context.obj``, and may serve models
in its own process with ``running_server``.
"""

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.cli._embedded import RunningServer, running_server
from darkbloom_core.cli._main import main

__all__ = ["CommandContext", "RunningServer", "main", "running_server"]
