"""Where pictures stand in a prompt: spans that touch are one picture, as in ``transformers``. Pure."""

from __future__ import annotations

from darkbloom_core.contracts import MediaSpan


def picture_runs(spans: tuple[MediaSpan, ...]) -> tuple[tuple[int, int], ...]:
    """(first token, end) of every run of ``spans`` that touch, in order."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        end = span.start + span.length
        if runs and runs[-1][1] == span.start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((span.start, end))
    return tuple(runs)
