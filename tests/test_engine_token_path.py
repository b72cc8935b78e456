"""What runs for each token: no logging, no hooks, no metrics, no JSON, and one wake-up per step for all readers."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading

import httpx
import pytest
from toy_engine import LAYERS, request, start
from toy_family import ToyModel

from darkbloom_core.contracts import RequestFinished, RequestStarted
from darkbloom_core.engine import _threads

BANNED = ("logging", "json", "pluggy", "darkbloom_core.telemetry", "darkbloom_core.plugins", "opentelemetry")


class Calls:
    """Names of the modules whose functions the threads that start from now on call, while ``counting``."""

    def __init__(self) -> None:
        self.counting = False
        self.modules: set[str] = set()

    def __call__(self, frame, event, argument) -> None:
        if self.counting and event == "call":
            self.modules.add(frame.f_globals.get("__name__", ""))


@pytest.fixture
def calls(monkeypatch):
    """Made before the engine's thread starts, which is none that rests, so that it sees all that the thread does."""
    monkeypatch.setattr(_threads, "_resting", [])
    calls = Calls()
    threading.setprofile(calls)
    gc.disable()  # whoever wants to be told of collections would be told on any thread
    yield calls
    gc.enable()
    threading.setprofile(None)


def test_nothing_but_the_engine_and_the_model_runs_on_the_engines_thread_for_200_tokens(calls):
    engine = start(ToyModel(LAYERS), event_buffer=8)  # so that it is never far ahead of its readers
    try:
        streams = [
            iter(engine.submit(request(str(number), [number + 1], 300, stop=("~~~~",))))
            for number in range(4)
        ]
        for stream in streams:
            next(stream)
        before = engine.status().output_tokens
        calls.counting = True
        for _ in range(220):
            for stream in streams:
                next(stream)
        calls.counting = False
        assert engine.status().output_tokens - before >= 4 * 200
    finally:
        engine.close()
    assert "darkbloom_core.engine._runner" in calls.modules
    assert [module for module in calls.modules if module.startswith(BANNED)] == []
    standard = {"threading", "codecs", "typing"}
    others = {module.partition(".")[0] for module in calls.modules - standard}
    assert others <= {"darkbloom_core", "toy_family", "encodings"}, others


def test_all_readers_of_an_event_loop_are_woken_once_per_step():
    engine = start(ToyModel(LAYERS))
    wakes = []

    async def read(stream) -> int:
        return sum([1 async for _ in stream])

    async def read_all() -> list[int]:
        loop = asyncio.get_running_loop()
        schedule = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: wakes.append(call) or schedule(*call)
        streams = [engine.submit(request(str(number), [number + 1], 50)) for number in range(8)]
        return await asyncio.gather(*map(read, streams))

    try:
        events = asyncio.run(read_all())
        steps = engine.status().steps
    finally:
        engine.close()
    assert events == [51] * 8
    first_tokens = ends = 8
    assert len(wakes) <= steps + first_tokens + ends < sum(events) // 2


def test_a_streamed_answer_of_200_tokens_logs_nothing_and_emits_what_one_of_1_token_does(toy_server, caplog):
    caplog.set_level(logging.DEBUG)
    kinds = []
    for tokens in (1, 200):
        toy_server.wait_until_idle(5)
        toy_server.sink.take()
        caplog.clear()
        body = {
            "model": "toy/plain",
            "prompt": "HELLO",
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
        }
        with httpx.stream("POST", f"{toy_server.url}/v1/completions", json=body, timeout=30) as answer:
            chunks = [line for line in answer.iter_lines() if line.startswith("data: {")]
        toy_server.wait_until_idle(5)
        kinds.append([type(event) for event in toy_server.sink.take(object)])
        ours = [record.getMessage() for record in caplog.records if record.name.startswith("darkbloom")]
        assert ours == []
        assert len(chunks) >= tokens / 2
    assert kinds == [[RequestStarted, RequestFinished]] * 2
