"""Shows how far models are loaded: bars on a terminal, two plain lines a model elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TextIO

from darkbloom_core.cli._format import byte_text
from darkbloom_core.contracts import Progress as Report

if TYPE_CHECKING:
    from rich.progress import Progress

Loading = Callable[[str], AbstractContextManager[Report]]
"""``with loading(name) as report:`` loads one model, and left without an error it is loaded."""


@contextmanager
def loading_progress(stream: TextIO | None = None) -> Iterator[Loading]:
    """While the block runs, models are loaded with what it is given."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield lambda name: _plain(name, stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream)) as bars:
        yield lambda name: _bar(bars, name)


@contextmanager
def _bar(bars: Progress, name: str) -> Iterator[Report]:
    task = bars.add_task(name, total=None)
    total = 1  # a bar needs one, and a family need not tell it

    def heard(done: int, of: int) -> None:
        nonlocal total
        total = of
        bars.update(task, completed=done, total=of)

    yield heard
    bars.update(task, completed=total, total=total)


@contextmanager
def _plain(name: str, stream: TextIO) -> Iterator[Report]:
    started = time.monotonic()
    total = 0

    def heard(done: int, of: int) -> None:  # noqa: ARG001  # only the end is told
        nonlocal total
        total = of

    print(f"loading {name}", file=stream, flush=True)
    yield heard
    size = f"{byte_text(total)} " if total else ""
    print(f"loaded {name}: {size}in {time.monotonic() - started:.1f} s", file=stream, flush=True)
