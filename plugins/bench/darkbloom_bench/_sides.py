"""The two sides of a comparison, and what they share."""

from __future__ import annotations

from typing import Protocol

from darkbloom_bench._jobs import Job, Recorder, Trace


class Side(Protocol):
    """Something that runs jobs. ``name`` is what the report calls it."""

    @property
    def name(self) -> str: ...

    def run(self, job: Job) -> Trace:
        """Run ``job`` to where it is over; nothing of it goes on afterwards. Raises whatever broke it."""
        ...


class RunError(Exception):
    """A run did not come to its end."""


def check_complete(recorder: Recorder) -> None:
    """Raise ``RunError`` if a row ended before a held run was over."""
    if recorder.ended_early is not None:
        raise RunError(f"row {recorder.ended_early} had all its tokens before every row had enough")
