"""Time to the first token of a prompt that nobody has asked before, and of one whose beginning is known.

A round is a new prompt, the same prompt again, and its next turn: the prompt, the answer,
and ``NEW_TOKENS`` more. Always true: both sides get prompts of the same lengths, each
round's are its own, and rounds of the sides take turns.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from darkbloom_bench._measure import Cell
from darkbloom_core.contracts import ContentDelta, Prompt
from darkbloom_core.engine import Engine, GenerationRequest, OutputEnd, PlainParser, SamplingParams

ANSWER_TOKENS = 8
NEW_TOKENS = 64

CASES = ("cold", "repeated", "next turn")


@dataclass(frozen=True, slots=True)
class Asked:
    """What one prompt came to: seconds to its first token, prompt tokens that were not computed, the answer."""

    seconds: float
    cached: int
    answer: tuple[int, ...]


class Asks(Protocol):
    """A side that answers one prompt at a time, and remembers them in its own way."""

    def ask(self, prompt: Sequence[int]) -> Asked: ...


class OurPrompts:
    """``engine`` is ready; its codec writes tokens as decimal numbers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()

    def ask(self, prompt: Sequence[int]) -> Asked:
        request = GenerationRequest(
            id=f"first-token-{next(self._ids)}",
            prompt=Prompt(tuple(prompt)),
            parser=PlainParser(),
            max_tokens=ANSWER_TOKENS,
            sampling=SamplingParams(temperature=0.0),
            ignore_stop_ids=True,
        )
        began, first, words, cached = time.perf_counter(), None, [], 0
        for event in self._engine.submit(request):
            if isinstance(event, OutputEnd):
                if event.error is not None:
                    raise event.error
                cached = event.usage.cached_tokens
            else:
                first = first or time.perf_counter()
                words += [delta.text for delta in event.deltas if isinstance(delta, ContentDelta)]
        assert first is not None
        return Asked(first - began, cached, tuple(map(int, "".join(words).split())))


class MlxLmPrompts:
    """mlx-lm's ``LRUPromptCache``, used as mlx-lm's own server does for one request after the other."""

    def __init__(self, model: Any) -> None:
        from mlx_lm.models.cache import LRUPromptCache

        self._model = model
        self._cache: Any = LRUPromptCache()

    def ask(self, prompt: Sequence[int]) -> Asked:
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import make_prompt_cache

        began, first = time.perf_counter(), None
        cache, rest = self._cache.fetch_nearest_cache("model", list(prompt))
        cache = cache or make_prompt_cache(self._model)
        tokens: list[int] = []
        for token, _ in generate_step(
            mx.array(rest), self._model, max_tokens=ANSWER_TOKENS, prompt_cache=cache
        ):
            first = first or time.perf_counter()
            tokens.append(int(token))
        self._cache.insert_cache("model", [*prompt, *tokens], cache)
        assert first is not None
        return Asked(first - began, len(prompt) - len(rest), tuple(tokens))


def measure_prompts(
    lengths: Sequence[int],
    vocab_size: int,
    sides: dict[str, Asks],
    repeats: int,
    say: Callable[[str], None],
    settle: Callable[[], None],
) -> list[Cell]:
    """Cells of each length of prompt: ``sides`` has ``ours``, and may have ``off`` (ours without reuse) and ``peer``."""
    chance, cells = random.Random(0), []
    for tokens in lengths:
        found: dict[str, list[dict[str, Asked]]] = {name: [] for name in sides}
        for repeat in range(repeats + 1):
            order = list(sides) if repeat % 2 else list(reversed(sides))
            for name in order:
                settle()
                asked = _round(sides[name], name, tokens, vocab_size, chance)
                shown = ", ".join(f"{case} {one.seconds * 1000:.4g} ms" for case, one in asked.items())
                say(f"{tokens} tokens, {name}, {f'repeat {repeat}' if repeat else 'warm-up'}: {shown}")
                if repeat:
                    found[name].append(asked)
        cells += _cells(tokens, found)
    return cells


def _round(side: Asks, name: str, tokens: int, vocab_size: int, chance: random.Random) -> dict[str, Asked]:
    prompt = [chance.randrange(vocab_size) for _ in range(tokens)]
    asked = {"cold": side.ask(prompt)}
    if name != "off":
        asked["repeated"] = side.ask(prompt)
        more = [chance.randrange(vocab_size) for _ in range(NEW_TOKENS)]
        asked["next turn"] = side.ask([*prompt, *asked["repeated"].answer, *more])
    return asked


def _cells(tokens: int, found: dict[str, list[dict[str, Asked]]]) -> list[Cell]:
    ours, peer, off = (found.get(name, []) for name in ("ours", "peer", "off"))

    def cell(
        metric: str, unit: str, better: str, mine: Sequence[float], theirs: Sequence[float] = ()
    ) -> Cell:
        one, other = median(mine), median(theirs) if theirs else None
        return Cell(
            workload=f"{tokens} tokens",
            rows=1,
            metric=metric,
            unit=unit,
            better=better,
            ours=one,
            peer=other,
            ratio=one / other if other else None,
            ours_all=tuple(mine),
            peer_all=tuple(theirs),
        )

    def milliseconds(rounds: list[dict[str, Asked]], case: str) -> list[float]:
        return [asked[case].seconds * 1000 for asked in rounds]

    def gains(rounds: list[dict[str, Asked]], case: str) -> list[float]:
        return [asked["cold"].seconds / asked[case].seconds for asked in rounds]

    def cached(rounds: list[dict[str, Asked]], case: str) -> list[float]:
        return [float(asked[case].cached) for asked in rounds]

    cells = [
        cell(f"first token, {case}", "ms", "lower", milliseconds(ours, case), milliseconds(peer, case))
        for case in CASES
    ]
    if off:
        both = [
            mine["cold"].seconds / without["cold"].seconds for mine, without in zip(ours, off, strict=True)
        ]
        cells.append(cell("cold, by cold without reuse", "x", "lower", both))
    for case in CASES[1:]:
        cells.append(cell(f"cold by {case}", "x", "higher", gains(ours, case), gains(peer, case)))
        cells.append(cell(f"cached, {case}", "tokens", "higher", cached(ours, case), cached(peer, case)))
    return cells
