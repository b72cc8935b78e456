"""A server inside a command's own process, for `chat` and for commands of plugins. Light to import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from darkbloom_core.cli._context import CommandContext

if TYPE_CHECKING:
    from darkbloom_core.slots import Slot


@dataclass(frozen=True, slots=True)
class RunningServer:
    """``url`` is ``http://host:port``; ``slots`` are the models it serves, in the order asked for."""

    url: str
    slots: tuple[Slot, ...]


@contextmanager
def running_server(
    command: CommandContext, words: Sequence[str] = (), *, demo: bool = False, config: Path | None = None
) -> Iterator[RunningServer]:
    """Serve on a free loopback port while the block runs; ``words`` and ``demo`` are those of `serve`.

    Shows progress on stderr. Raises ``SetupError`` if anything named cannot be served.
    """
    from darkbloom_core.cli._backend import require_backend
    from darkbloom_core.settings import load_settings

    settings = load_settings(config)
    require_backend()
    from darkbloom_core.cli._choose import choose_models
    from darkbloom_core.cli._running import loaded_app
    from darkbloom_core.server import BackgroundServer

    chosen = choose_models(command, words, settings, demo=demo)
    with loaded_app(command, settings, chosen) as (app, slots), BackgroundServer(app) as server:
        yield RunningServer(server.url, slots)
