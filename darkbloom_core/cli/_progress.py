"""Shows how far models are loaded: bars on a terminal, a few plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from darkbloom_core.cli._format import byte_text
from darkbloom_core.contracts import Progress

ProgressFor = Callable[[str], Progress]
"""Gives each model, by its name, the function that hears of its progress."""


@contextmanager
def loading_progress(stream: TextIO | None = None) -> Iterator[ProgressFor]:
    """While the block runs, models may be loaded with the progress functions that it is given."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield lambda name: _plain(name, stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(file=stream)) as bars:

        def bar(name: str) -> Progress:
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield bar


def _plain(name: str, stream: TextIO) -> Progress:
    """Say that loading begins, and that it is done; in between nothing."""
    started = time.monotonic()
    said_done = False
    print(f"loading {name}", file=stream, flush=True)

    def heard(done: int, total: int) -> None:
        nonlocal said_done
        if done >= total and not said_done:
            said_done = True
            seconds = time.monotonic() - started
            print(f"loaded {name}: {byte_text(total)} in {seconds:.1f} s", file=stream, flush=True)

    return heard
