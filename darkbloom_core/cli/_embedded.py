"""A server inside a command's own process, for `chat` and for commands of plugins. Light to import."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from darkbloom_core.cli._context import CommandContext

if TYPE_CHECKING:
    from darkbloom_core.settings import Settings
    from darkbloom_core.slots import Slot


@dataclass(frozen=True, slots=True)
class RunningServer:
    """``url`` is ``http://host:port``; ``slots`` are the models it serves, in the order asked for.

    ``key`` is the API key that it wants: made for it alone, so that no other user of the machine gets in.
    """

    url: str
    key: str = field(repr=False)
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

    key = secrets.token_urlsafe(32)
    settings = _with_one_key(load_settings(config), key)
    require_backend()
    from darkbloom_core.cli._choose import choose_models
    from darkbloom_core.cli._running import loaded_app
    from darkbloom_core.server import BackgroundServer

    chosen = choose_models(command, words, settings, demo=demo)
    with loaded_app(command, settings, chosen) as (app, slots), BackgroundServer(app) as server:
        yield RunningServer(server.url, key, slots)


def _with_one_key(settings: Settings, key: str) -> Settings:
    from pydantic import SecretStr

    server = settings.server.model_copy(update={"key_file": None})
    return settings.model_copy(update={"server": server, "keys": {"this-process": SecretStr(key)}})
