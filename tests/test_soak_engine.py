"""Thousands of requests through a live engine, a third of them cancelled at random moments: nothing is left of them."""

from __future__ import annotations

import gc
import json
import random
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil
import pytest
from crowd import Asked, Crowd
from soak import curve, keep, length
from toy_engine import LAYERS, is_empty, wait_for
from toy_family import VOCABULARY, ToyCodec, ToyModel, full, window

from darkbloom_core.checkpoint import read_config
from darkbloom_core.contracts import Chat, Message, Placement, Prompt, TextPart
from darkbloom_core.engine import (
    Engine,
    EngineOptions,
    GenerationRequest,
    OutputStream,
    PlainParser,
    SamplingParams,
)
from darkbloom_core.engine._live import Live
from darkbloom_core.plugins import load_plugins
from darkbloom_core.slots import current_device

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

EVERY = 500
"""Requests between two looks at what is held."""

MOST_GROWTH_BYTES = 2 * 2**20
"""Resident memory may grow by this much over the second half of a run."""

MOMENTS = ("queued", "prefill", "decode", "paused")

FAILS = 13
"""A prompt whose last chunk has this many tokens breaks its step."""

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Held:
    """What a process and an engine at rest hold. ``arrays`` and the objects are those that Python can reach."""

    kv_bytes_used: int
    kv_bytes_reserved: int
    open_rows: int
    threads: int
    streams: int
    requests: int
    arrays: int
    active_bytes: int
    resident_bytes: int


def collected() -> list[object]:
    """What Python can reach, without what only waits to be collected."""
    gc.collect()
    return gc.get_objects()


def held(engine: Engine) -> Held:
    wait_for(lambda: is_empty(engine) and engine._loop.runner.is_idle)
    # The thread lets go of its last stream a moment after it has told the end.
    wait_for(lambda: not any(isinstance(one, OutputStream) for one in collected()))
    objects = collected()
    status = engine.status()
    return Held(
        kv_bytes_used=status.kv_bytes_used,
        kv_bytes_reserved=status.kv_bytes_reserved,
        open_rows=engine._loop.store.open_rows,
        threads=threading.active_count(),
        streams=sum(isinstance(one, OutputStream) for one in objects),
        requests=sum(isinstance(one, Live | GenerationRequest) for one in objects),
        arrays=sum(isinstance(one, mx.array) for one in objects),
        active_bytes=mx.get_active_memory(),
        resident_bytes=psutil.Process().memory_info().rss,
    )


class Toys:
    """Requests for a toy model: everything that a request can ask for, and prompts whose greedy text is known."""

    def __init__(self, model: ToyModel, *, breaks: bool) -> None:
        self._breaks = breaks
        numbers = np.random.default_rng(5)
        lengths = [n for n in range(1, 60) if n % 16 != FAILS][::2]
        self._prompts = [numbers.integers(0, VOCABULARY, n).tolist() for n in lengths]
        codec = ToyCodec()
        self._texts = [
            b"".join(map(codec.token_bytes, model.greedy(prompt, 40))).decode() for prompt in self._prompts
        ]

    def ask(self, chance: random.Random, number: int) -> Asked:
        if self._breaks and chance.random() < 0.01:
            broken = GenerationRequest(
                id=str(number), prompt=Prompt((1,) * (16 + FAILS)), parser=PlainParser(), max_tokens=5
            )
            return Asked(broken, fails=True)
        choice, most = chance.randrange(len(self._prompts)), chance.randint(1, 40)
        text = self._texts[choice][:most]
        stop = self._stop(chance, self._texts[choice])
        prompt = [*self._prompts[choice]]
        sampling = GREEDY
        if chance.random() < 0.5:
            sampling, text = self._sampling(chance), None
        if chance.random() < 0.2:
            prompt, text = prompt * (400 // len(prompt)), None
            prompt = prompt[: len(prompt) - len(prompt) % 16]
        request = GenerationRequest(
            id=str(number),
            prompt=Prompt(tuple(prompt)),
            parser=PlainParser(),
            max_tokens=most,
            sampling=sampling,
            stop=stop,
            priority=chance.choice((0, 0, 0, 1)),
        )
        return Asked(request, None if text is None else until(text, stop))

    def _stop(self, chance: random.Random, text: str) -> tuple[str, ...]:
        if chance.random() < 0.7:
            return ()
        starts = [chance.randrange(len(text) - 3) for _ in range(chance.randint(1, 3))]
        return tuple(text[start : start + chance.randint(1, 3)] for start in starts)

    def _sampling(self, chance: random.Random) -> SamplingParams:
        return SamplingParams(
            temperature=chance.choice((0.0, 0.7, 1.5)),
            top_k=chance.choice((0, 0, 5)),
            top_p=chance.choice((1.0, 0.9)),
            min_p=chance.choice((0.0, 0.1)),
            repetition_penalty=chance.choice((1.0, 1.2)),
            frequency_penalty=chance.choice((0.0, 0.5)),
            logit_bias=chance.choice(({}, {3: 2.0})),
            seed=chance.choice((None, 7)),
            logprobs=chance.choice((None, None, 3)),
        )


def until(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first."""
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    return text[: min(ends)[1]] if ends else text


class Chats:
    """The checked prompts of a demo checkpoint, some cut short."""

    def __init__(self, folder: Path, codec) -> None:
        self._codec = codec
        asked = json.loads((folder / "prompts.json").read_text())
        self._asked = [
            one for one in asked if "tools" not in one and isinstance(one["messages"][0]["content"], str)
        ]

    def ask(self, chance: random.Random, number: int) -> Asked:
        one = chance.choice(self._asked)
        turns = tuple(
            Message(role=turn["role"], content=(TextPart(turn["content"]),)) for turn in one["messages"]
        )
        chat, whole = Chat(messages=turns), chance.random() < 0.3
        request = GenerationRequest(
            id=str(number),
            prompt=self._codec.encode_chat(chat),
            parser=self._codec.parser(chat),
            max_tokens=120 if whole else chance.randint(1, 20),
            sampling=GREEDY,
        )
        return Asked(request, one.get("answer") if whole else None)


def soak(name: str, engine: Engine, crowd: Crowd, requests: int) -> None:
    """Ask ``requests``, look at what is held every ``EVERY``, and let nothing grow."""
    crowd.play(min(EVERY, requests // 5))  # pools, caches and what is made once
    before = held(engine)
    looks = []
    for _ in range(0, requests, EVERY):
        crowd.play(min(EVERY, requests))
        looks.append(held(engine))
    resident = [look.resident_bytes for look in looks]
    growth = resident[-1] - resident[len(resident) // 2]
    found = crowd.found
    keep(
        name,
        f"{requests:,} requests, {sum(found.moments.values()):,} cancelled; arrays {before.arrays} before and "
        f"{looks[-1].arrays} after, resident memory {resident[0] / 2**20:.1f} to {resident[-1] / 2**20:.1f} MiB "
        f"`{curve(resident)}`",
        {
            "requests": requests,
            "ends": dict(found.reasons),
            "cancelled while": dict(found.moments),
            "texts compared": found.checked_texts,
            "growth of resident bytes over the second half": growth,
            "limit of that growth": MOST_GROWTH_BYTES,
            "before": vars(before),
            f"every {EVERY} requests": [vars(look) for look in looks],
        },
    )
    for look in looks:
        for what in (
            "kv_bytes_used",
            "kv_bytes_reserved",
            "open_rows",
            "threads",
            "streams",
            "requests",
            "arrays",
        ):
            assert getattr(look, what) == getattr(before, what), what
    assert growth <= MOST_GROWTH_BYTES
    assert found.checked_texts > requests // 10
    cancelled = sum(found.moments.values())
    assert requests / 4 < cancelled < requests / 2
    for moment in MOMENTS if requests >= EVERY else ():
        assert found.moments[moment] > cancelled // 50, moment


def start(load, codec, **options) -> Engine:
    engine = Engine("soak", codec, load, EngineOptions(event_buffer=8, **options))
    engine.load_model()
    engine.start(1 << 27)
    return engine


def test_nothing_is_left_of_requests_to_a_model_of_every_kind_of_layer():
    model = ToyModel(LAYERS, fail_on=FAILS, embeds=deque(maxlen=1))  # it remembers no steps
    engine = start(lambda: model, ToyCodec(), chunk_tokens=16)
    toys = Toys(ToyModel(LAYERS), breaks=True)
    soak("engine-toy", engine, Crowd(engine, toys.ask), length(10_000, 500))
    engine.close()


def test_nothing_is_left_of_requests_that_are_packed_and_chained():
    layers = [window(8, sinks=True), full(), window(16), full(source=1)]
    model = ToyModel(layers, embeds=deque(maxlen=1))
    engine = start(lambda: model, ToyCodec(), chunk_tokens=64, packed=True, chained=True)
    toys = Toys(model, breaks=False)
    soak("engine-toy-packed", engine, Crowd(engine, toys.ask), length(5_000, 300))
    engine.close()


def test_nothing_is_left_of_chats_with_a_demo_checkpoint():
    plugins, device = load_plugins(), current_device()
    folder = plugins.checkpoints()["demo/gpt-oss"]
    config = read_config(folder)
    family = plugins.family_for(config)
    description = family.describe(config, device)
    codec = family.codec(folder, description)
    engine = start(lambda: family.load(folder, description, Placement(device)), codec)
    soak("engine-demo", engine, Crowd(engine, Chats(folder, codec).ask), length(2_000, 60))
    engine.close()
