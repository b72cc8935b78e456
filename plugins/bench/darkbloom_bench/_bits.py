"""Whether a request that reuses a prefix has the bits of one that computes it: every logit, and two controls.

The controls reuse what another cut of the prompt computed, and what decode steps did. Where
one differs, the device's bits depend on how a prefix was computed, so that their equality
above means something.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from darkbloom_core.contracts import Array, LoadedModel, Prompt
from darkbloom_core.engine import (
    Engine,
    GenerationRequest,
    OutputDelta,
    OutputEnd,
    PlainParser,
    SamplingParams,
)
from darkbloom_core.prefix import BLOCK_TOKENS

NEW_TOKENS = 8


class RecordingModel:
    """A loaded model as it is, that also keeps the logits of every step."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.kept: list[Array] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Array) -> Array:
        """As the model's own, and remembered."""
        logits = self._model.logits(hidden)
        self.kept.append(logits)
        return logits


@dataclass(frozen=True, slots=True)
class Ran:
    """``logits`` has the bytes of each step's ``[1, V]``, ``tokens`` the answer."""

    cached: int
    logits: tuple[bytes, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """A warm request beside a cold one: ``steps`` of output, and those whose logits have other bits."""

    what: str
    prompt_tokens: int
    cached_tokens: int
    steps: int
    differing_steps: int
    differing_logits: int
    logits: int


class Bits:
    """Requests through ``engine`` over ``model``, one after the other."""

    def __init__(self, engine: Engine, model: RecordingModel) -> None:
        self._engine = engine
        self._model = model
        self._ids = itertools.count()

    def run(self, prompt: Sequence[int], *, cold: bool = False, new_tokens: int = NEW_TOKENS) -> Ran:
        """A cold request is in a scope of its own, so that it finds nothing."""
        name = f"bits-{next(self._ids)}"
        request = GenerationRequest(
            id=name,
            prompt=Prompt(tuple(prompt)),
            parser=PlainParser(),
            max_tokens=new_tokens,
            sampling=SamplingParams(
                temperature=0.0, logprobs=0
            ),  # each token is told, whether it has text or not
            ignore_stop_ids=True,
            scope=name if cold else None,
        )
        self._model.kept.clear()
        events = list(self._engine.submit(request))
        end = events[-1]
        assert isinstance(end, OutputEnd)
        if end.error is not None:
            raise end.error
        kept = tuple(bytes(memoryview(cast(Any, logits))) for logits in self._model.kept[:NEW_TOKENS])
        tokens = tuple(
            one.token for event in events[:-1] if isinstance(event, OutputDelta) for one in event.logprobs
        )
        return Ran(end.usage.cached_tokens, kept, tokens)

    def compare(self, what: str, prompt: Sequence[int]) -> Compared:
        """Run ``prompt`` with what is remembered, and cold."""
        warm, cold = self.run(prompt), self.run(prompt, cold=True)
        pairs = list(zip(warm.logits, cold.logits, strict=True))
        differing = [
            sum(a != b for a, b in zip(_values(one), _values(two), strict=True)) for one, two in pairs
        ]
        return Compared(
            what=what,
            prompt_tokens=len(prompt),
            cached_tokens=warm.cached,
            steps=len(pairs),
            differing_steps=sum(count > 0 for count in differing),
            differing_logits=sum(differing),
            logits=sum(len(_values(one)) for one, _ in pairs),
        )


def compare_exact(
    bits: Bits, vocab_size: int, lengths: Sequence[int], say: Callable[[str], None]
) -> list[Compared]:
    """Each prompt again, and a longer one that begins like it."""
    chance, found = random.Random(1), []
    for tokens in lengths:
        prompt = [chance.randrange(vocab_size) for _ in range(tokens)]
        bits.run(prompt)
        grown = [*prompt, *(chance.randrange(vocab_size) for _ in range(BLOCK_TOKENS + 77))]
        for what, ids in (("repeated", prompt), ("grown", grown)):
            found.append(bits.compare(what, ids))
            say(f"{found[-1]}")
    return found


def compare_off_grid(bits: Bits, vocab_size: int, tokens: int, say: Callable[[str], None]) -> Compared:
    """A prompt of which the first block is known, from a prompt that ended there, where a cold one cuts later.

    For an engine whose reuse is relaxed and whose grid is longer than a block.
    """
    chance = random.Random(2)
    prompt = [chance.randrange(vocab_size) for _ in range(tokens)]
    bits.run(prompt[:BLOCK_TOKENS])
    found = bits.compare("off the grid", prompt)
    say(f"{found}")
    return found


def compare_decoded(bits: Bits, vocab_size: int, say: Callable[[str], None]) -> Compared:
    """A conversation whose second block ends in what decode steps computed; for an engine whose reuse is relaxed."""
    chance = random.Random(3)
    prompt = [chance.randrange(vocab_size) for _ in range(2 * BLOCK_TOKENS - 50)]
    answer = bits.run(prompt, new_tokens=60).tokens
    found = bits.compare(
        "decoded", [*prompt, *answer, *(chance.randrange(vocab_size) for _ in range(BLOCK_TOKENS))]
    )
    say(f"{found}")
    return found


def _values(logits: bytes) -> Sequence[int]:
    """The logits as whole numbers of two bytes: as many as there are in bfloat16, twice as many in float32."""
    return memoryview(logits).cast("H")
