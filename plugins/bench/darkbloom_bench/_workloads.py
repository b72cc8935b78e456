"""The workloads: which requests, and which figures are read from a run of them.

A workload makes a job from a seed; each repeat has its own seed, so no prompt ever comes
twice and nothing that was kept from one run can shorten another.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from darkbloom_bench._jobs import Arrival, Job, Trace
from darkbloom_bench._metrics import (
    DECODE,
    Figures,
    decode_rate,
    interference,
    rate_between_first_and_last,
    whole_run,
)
from darkbloom_core.errors import SettingsError

SHORT_PROMPT_TOKENS = 100
STAGGER_TOKENS = 2048
"""How many tokens an early row may produce while the others' prompts are still prefilled."""


@dataclass(frozen=True, slots=True)
class Run:
    """One kind of run: how its job is made, what is read from it, and whether tokens are compared."""

    name: str
    job: Callable[[random.Random], Job]
    figures: Callable[[Trace], Figures]
    compare_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """``rows`` is how many rows decode at once, ``longest_tokens`` the most that one may have, prompt and output."""

    name: str
    rows: int
    longest_tokens: int
    runs: tuple[Run, ...]

    def job(self, run: Run, seed: int) -> Job:
        """The job of repeat ``seed``; the same for both sides."""
        return run.job(random.Random(f"{self.name} {run.name} {seed}"))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the workloads are made to: ids below ``vocab_size``, ``new_tokens`` for each row."""

    vocab_size: int
    new_tokens: int = 128
    long_prompt_tokens: int = 8192
    churn_requests: int = 32


def workload(name: str, sizes: Sizes) -> Workload:
    """The workload called ``name``; ``rows-N`` has N rows of short prompts, ``rows-NxL`` of L tokens.

    Raises ``SettingsError`` that lists the names.
    """
    rows = re.fullmatch(r"rows-(\d+)(?:x(\d+))?", name)
    if rows and int(rows[1]) and int(rows[2] or 1):
        return _burst(name, [int(rows[2] or SHORT_PROMPT_TOKENS)] * int(rows[1]), sizes)
    if name in _NAMED:
        return _NAMED[name](name, sizes)
    raise SettingsError(f"no workload {name!r}: there are {', '.join(_NAMED)}, rows-N and rows-NxPROMPT")


def _burst(name: str, lengths: list[int], sizes: Sizes) -> Workload:
    """Prompts of ``lengths`` tokens at once: decode with all rows live, then a whole run."""
    new = sizes.new_tokens

    def held(source: random.Random) -> Job:
        limit = new + STAGGER_TOKENS
        return Job(tuple(Arrival(_ids(source, length, sizes), limit) for length in lengths), new)

    def whole(source: random.Random) -> Job:
        return Job(tuple(Arrival(_ids(source, length, sizes), new) for length in lengths))

    return Workload(
        name,
        len(lengths),
        max(lengths) + new + STAGGER_TOKENS,
        (
            Run("decode", held, lambda trace: {DECODE: decode_rate(trace, new)}),
            Run("whole", whole, whole_run, compare_tokens=True),
        ),
    )


def _churn(name: str, sizes: Sizes) -> Workload:
    """Poisson arrivals, outputs of exponential length: 85 % of what keeps the rows busy, six rows to begin with."""
    rows, mean, longest_prompt, longest_output = 8, sizes.new_tokens / 2, 256, 4 * sizes.new_tokens

    def job(source: random.Random) -> Job:
        def arrivals() -> Iterator[Arrival]:
            at = 0.0
            for index in range(sizes.churn_requests):
                at += source.expovariate(0.85 / mean) if index >= 6 else 0.0
                length = round(math.exp(source.uniform(math.log(16), math.log(longest_prompt))))
                new = min(1 + int(source.expovariate(1 / mean)), longest_output)
                yield Arrival(_ids(source, length, sizes), new, int(at))

        return Job(tuple(arrivals()))

    def figures(trace: Trace) -> Figures:
        return {DECODE: rate_between_first_and_last(trace), **whole_run(trace)}

    return Workload(
        name, rows, longest_prompt + longest_output, (Run("whole", job, figures, compare_tokens=True),)
    )


def _interference(name: str, sizes: Sizes) -> Workload:
    """Four decoding rows, and a long prompt once each of them has about 32 tokens."""
    rows, begin, length = 4, 32, sizes.long_prompt_tokens

    def job(source: random.Random) -> Job:
        limit = begin + length
        short = tuple(Arrival(_ids(source, SHORT_PROMPT_TOKENS, sizes), limit) for _ in range(rows))
        return Job((*short, Arrival(_ids(source, length, sizes), 64, rows * begin)), hold_tokens=8)

    return Workload(
        name,
        rows,
        max(SHORT_PROMPT_TOKENS + begin + length, length + 64),
        (Run("interference", job, lambda trace: interference(trace, length)),),
    )


def _ids(source: random.Random, length: int, sizes: Sizes) -> tuple[int, ...]:
    return tuple(source.randrange(sizes.vocab_size) for _ in range(length))


_NAMED: dict[str, Callable[[str, Sizes], Workload]] = {
    "solo": lambda name, sizes: _burst(name, [SHORT_PROMPT_TOKENS], sizes),
    "uniform": lambda name, sizes: _burst(name, [300] * 8, sizes),
    "mixed": lambda name, sizes: _burst(name, [64, 128, 256, 400, 700, 1024, 1500, 2048], sizes),
    "short": lambda name, sizes: _burst(name, [32] * 8, sizes),
    "churn": _churn,
    "interference": _interference,
}
