"""Engines of toy models, requests for them, and waiting for what an engine comes to."""

from __future__ import annotations

import contextlib
import time

import numpy as np
from toy_family import ToyCodec, ToyModel, full, recurrent, window

from darkbloom_core.contracts import Prompt
from darkbloom_core.engine import Engine, EngineOptions, GenerationRequest, PlainParser, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
LAYERS = [window(8, sinks=True), full(), window(16), full(source=1), recurrent(), window(8, source=0)]


def start(model: ToyModel, grant: int = 1 << 26, codec: ToyCodec | None = None, **options) -> Engine:
    engine = Engine("toy", codec or ToyCodec(), lambda: model, EngineOptions(chunk_tokens=16, **options))
    engine.load_model()
    engine.start(grant)
    return engine


@contextlib.contextmanager
def engines():
    """Gives what starts an engine; all are closed at the end."""
    started = []

    def begin(model: ToyModel | None = None, **options) -> Engine:
        started.append(start(model or ToyModel(LAYERS), **options))
        return started[-1]

    try:
        yield begin
    finally:
        for engine in started:
            engine.close()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 64, random.integers(1, 60)).tolist() for _ in range(count)]


def request(name: str, ids, most: int = 20, sampling: SamplingParams = GREEDY, **more) -> GenerationRequest:
    return GenerationRequest(
        id=name, prompt=Prompt(tuple(ids)), parser=PlainParser(), max_tokens=most, sampling=sampling, **more
    )


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.005)


def is_empty(engine: Engine) -> bool:
    status = engine.status()
    return status.running == status.waiting == 0 and status.kv_bytes_reserved == status.kv_bytes_used
