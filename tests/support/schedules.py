"""Requests that come, go and are cancelled by a schedule, and what each of them gets when it is alone.

A schedule counts in moments: a chunk that begins, or a token that is delivered. Both
happen on the engine's thread and what is due then happens there too, so a schedule runs
the same way every time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from darkbloom_core.contracts import ChatCodec, LoadedModel, OutputParser, Prompt
from darkbloom_core.engine import (
    Engine,
    EngineOptions,
    GenerationRequest,
    OutputStream,
    PlainParser,
    SamplingParams,
    _runner,
)
from darkbloom_core.engine._sampling import Sampler

SAMPLED = {
    42: {"temperature": 0.8, "top_p": 0.9},
    43: {},
    44: {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}},
}
"""How rows are sampled, by their seed."""


@dataclass(frozen=True)
class Asked:
    """One row: when it joins and leaves, and what it wants. ``seed`` is one of ``SAMPLED``; None is greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    ignores_stops: bool = True
    joins_at: int = 0
    cancelled_at: int | None = None


@dataclass
class Got:
    """One row's output; ``logits[n]`` is what token ``n`` was chosen from."""

    tokens: list[int]
    reason: str
    logits: list[np.ndarray]


class WatchedModel:
    """A loaded model as it is. A chunk that begins is a moment."""

    def __init__(self, model: LoadedModel, on_moment: Callable[[], None]):
        self._model = model
        self._on_moment = on_moment

    def __getattr__(self, name):
        return getattr(self._model, name)

    def embed(self, ids, media=None):
        if ids.shape[1] > 1:
            self._on_moment()
        return self._model.embed(ids, media)


class WatchedCodec:
    """A codec as it is. A token that is delivered is a moment."""

    def __init__(self, codec: ChatCodec, on_moment: Callable[[], None]):
        self._codec = codec
        self._on_moment = on_moment

    def __getattr__(self, name):
        return getattr(self._codec, name)

    def token_bytes(self, token):
        self._on_moment()
        return self._codec.token_bytes(token)


class Stage:
    """A running engine that plays schedules. Between two decode steps at most one layer of a chunk runs.

    ``most_tokens`` is how far a row is run alone, once for each prompt and seed.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        codec: ChatCodec,
        *,
        most_tokens: int,
        parser: Callable[[], OutputParser] = PlainParser,
        grant_bytes: int = 1 << 28,
        **options: Any,
    ):
        self._most_tokens = most_tokens
        self._parser = parser
        self._kept: dict[tuple[str, int], tuple[Any, int]] = {}
        self._alone: dict[tuple[tuple[int, ...], int | None], Got] = {}
        self._lock = threading.Lock()
        self._moment = 0
        self._due: list[tuple[int, Callable[[], None]]] = []
        self._streams: dict[int, OutputStream] = {}
        options = {"slice_seconds": 1e-9, "event_buffer": 4096, "compiled": False, **options}

        def watched() -> Any:
            self._model = WatchedModel(load(), self._pass_moment)
            return self._model

        self.engine = Engine(
            "staged", WatchedCodec(codec, self._pass_moment), watched, EngineOptions(**options)
        )
        self.engine.load_model()
        self.engine.start(grant_bytes)
        self.stop_ids = self._model.stop_ids

    def close(self) -> None:
        self.engine.close()

    def play(self, schedule: Sequence[Asked]) -> list[Got]:
        """What each row gets, in the order of ``schedule``."""
        with patch.object(_runner, "Sampler", self._keeping_sampler()):
            return self._play(schedule)

    def _play(self, schedule: Sequence[Asked]) -> list[Got]:
        self._kept.clear()
        self._streams = {}
        self._moment = 0
        joins = sorted(range(len(schedule)), key=lambda index: (schedule[index].joins_at, index))
        self._due = sorted(
            [(schedule[index].joins_at, lambda index=index: self._join(index, schedule)) for index in joins]
            + [
                (row.cancelled_at, lambda index=index: self._streams[index].cancel())
                for index, row in enumerate(schedule)
                if row.cancelled_at is not None
            ],
            key=lambda event: event[0],
        )
        got: dict[int, Got] = {}
        while len(got) < len(schedule):
            unread = next((index for index in joins if index in self._streams and index not in got), None)
            if unread is None:  # nobody is left on the engine, so no moment will come by itself
                with self._lock:
                    moment, event = self._due.pop(0)
                    self._moment = max(self._moment, moment)
                    event()
                continue
            got[unread] = self._read(unread)
        return [got[index] for index in range(len(schedule))]

    def alone(self, row: Asked) -> Got:
        """What ``row`` gets on an engine that has nothing else to do."""
        key = (row.prompt, row.seed)
        if key not in self._alone:
            (self._alone[key],) = self.play([Asked(row.prompt, self._most_tokens, row.seed)])
        whole = self._alone[key]
        tokens = whole.tokens[: row.max_tokens]
        stops = [] if row.ignores_stops else [n for n, token in enumerate(tokens) if token in self.stop_ids]
        tokens = tokens[: stops[0] + 1] if stops else tokens
        return Got(tokens, "stop" if stops else "length", whole.logits[: len(tokens)])

    def _pass_moment(self) -> None:
        with self._lock:
            self._moment += 1
            while self._due and self._due[0][0] <= self._moment:
                self._due.pop(0)[1]()

    def _join(self, index: int, schedule: Sequence[Asked]) -> None:
        row = schedule[index]
        sampling = (
            SamplingParams(temperature=0.0, logprobs=0)
            if row.seed is None
            else SamplingParams(seed=row.seed, logprobs=0, **SAMPLED[row.seed])
        )
        self._streams[index] = self.engine.submit(
            GenerationRequest(
                id=str(index),
                prompt=Prompt(row.prompt),
                parser=self._parser(),
                max_tokens=row.max_tokens,
                sampling=sampling,
                ignore_stop_ids=row.ignores_stops,
            )
        )

    def _read(self, index: int) -> Got:
        *deltas, end = self._streams[index]
        assert end.error is None, end.error
        tokens = [entry.token for delta in deltas for entry in delta.logprobs]
        kept = [self._kept[str(index), place] for place in range(len(tokens))]
        logits = [np.array(array)[row] for array, row in kept]
        return Got(tokens, end.reason, logits)

    def _keeping_sampler(self) -> type[Sampler]:
        """The engine's sampler, that also notes by request and output index what it was given."""
        stage = self

        class KeepingSampler(Sampler):
            def __init__(self, rows, *others):
                super().__init__(rows, *others)
                lives = {id(live.sampled): live.request.id for live in stage.engine._desk.lives()}
                self.ids = [lives[id(row)] for row in rows]

            def sample(self, logits, steps, *others):
                for place, (name, step) in enumerate(zip(self.ids, steps, strict=True)):
                    stage._kept[name, step] = (logits, place)
                return super().sample(logits, steps, *others)

        return KeepingSampler


def schedules(
    prompts: Sequence[tuple[int, ...]], most_tokens: int, part: int = 0
) -> st.SearchStrategy[list[Asked]]:
    """Up to 8 rows of any of ``prompts``, greedy or sampled, that join and leave at any moment.

    Another ``part`` gives others for the same seeds.
    """
    seeds = st.integers(0, 2**32 - 1)
    return seeds.map(lambda seed: _schedule(random.Random(f"{part} {seed}"), prompts, most_tokens))


def _schedule(chance: random.Random, prompts: Sequence[tuple[int, ...]], most_tokens: int) -> list[Asked]:
    rows = []
    for _ in range(chance.choice([8, 8, 6, 4, 2])):
        # some come together, so that short prompts are packed
        joins_at = chance.choice([0, most_tokens // 2, chance.randint(0, most_tokens)])
        leaves = chance.random() < 0.25
        rows.append(
            Asked(
                prompt=chance.choice(prompts),
                max_tokens=chance.randint(chance.choice([1, most_tokens // 2]), most_tokens),
                seed=chance.choice([None, *SAMPLED]),
                ignores_stops=chance.random() < 0.5,
                joins_at=joins_at,
                cancelled_at=joins_at + chance.randint(1, 2 * most_tokens) if leaves else None,
            )
        )
    return rows
