"""From what happened in a run to figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Literal

from darkbloom_bench._jobs import Trace


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure's name and unit, and which of two values is the better one."""

    name: str
    unit: str
    better: Literal["higher", "lower"]


DECODE = Metric("decode", "tokens/s", "higher")
END_TO_END = Metric("end to end", "tokens/s", "higher")
FIRST_TOKEN = Metric("first token p50", "ms", "lower")
GAP_MEDIAN = Metric("inter-token p50", "ms", "lower")
GAP_P99 = Metric("inter-token p99", "ms", "lower")
GAP_LONGEST = Metric("inter-token longest", "ms", "lower")
GAP_ALONE = Metric("inter-token p50 alone", "ms", "lower")
PREFILL = Metric("prefill", "tokens/s", "higher")
SAME_TOKENS = Metric("same tokens", "rows", "higher")

Figures = dict[Metric, float]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def decode_rate(trace: Trace, hold_tokens: int) -> float:
    """Tokens per second while every row decodes: from the last row's first token on.

    The end is where every row has produced ``hold_tokens`` more.
    """
    start = max(times[0] for times in trace.times)
    later = [[time for time in times if time > start] for times in trace.times]
    end = max(times[hold_tokens - 1] for times in later)
    return sum(time <= end for times in later for time in times) / (end - start)


def rate_between_first_and_last(trace: Trace) -> float:
    """Tokens per second from the first token of the run to the last."""
    times = sorted(time for row in trace.times for time in row)
    return (len(times) - 1) / (times[-1] - times[0])


def whole_run(trace: Trace) -> Figures:
    """Rate and latencies of a run that went to its end, from the first submission on."""
    last = max(times[-1] for times in trace.times)
    first_tokens = [times[0] - at for times, at in zip(trace.times, trace.submitted, strict=True)]
    gaps = [gap for times in trace.times for gap in _gaps(times)]
    return {
        END_TO_END: sum(map(len, trace.times)) / (last - trace.started),
        FIRST_TOKEN: median(first_tokens) * 1000,
        GAP_MEDIAN: percentile(gaps, 0.5) * 1000,
        GAP_P99: percentile(gaps, 0.99) * 1000,
    }


def interference(trace: Trace, prompt_tokens: int) -> Figures:
    """How long decoding rows wait for tokens while the last row's prompt is prefilled.

    A gap counts if any of it lies between the submission of the prompt and its first token.
    """
    start, end = trace.submitted[-1], trace.times[-1][0]
    rows = trace.times[:-1]
    begun = max(times[0] for times in rows)
    during = [
        after - before
        for times in rows
        for before, after in pairwise(times)
        if after > start and before < end
    ]
    alone = [gap for times in rows for gap in _gaps([time for time in times if begun <= time <= start])]
    return {
        GAP_MEDIAN: percentile(during, 0.5) * 1000,
        GAP_P99: percentile(during, 0.99) * 1000,
        GAP_LONGEST: max(during) * 1000,
        GAP_ALONE: percentile(alone, 0.5) * 1000,
        PREFILL: prompt_tokens / (end - start),
    }


def same_rows(ours: Trace, peer: Trace) -> int:
    """How many rows produced the very same tokens on both sides."""
    return sum(one == other for one, other in zip(ours.tokens, peer.tokens, strict=True))


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]
