"""Both demo checkpoints under a cap that one setting lowers: one loads while the other serves, over HTTP."""

from __future__ import annotations

import time

import httpx
import pytest

from darkbloom_core.contracts import Prompt
from darkbloom_core.engine import GenerationRequest, PlainParser, SamplingParams
from darkbloom_core.memory import MachineReadings, Reading
from darkbloom_core.plugins import load_plugins
from darkbloom_core.server import BackgroundServer, create_app
from darkbloom_core.settings import Settings
from darkbloom_core.slots import SlotManager
from darkbloom_core.telemetry import SinkEmitter

MIB = 1024**2
A, B = "demo/gpt-oss", "demo/gemma4"
QUESTION = "List the numbers from 98 to 103."
STREAM_TOKENS, BUFFERED = 96, 16
"""Tokens of a stream, and how many of them its row runs ahead of its reader."""

LONG = 130_900
"""Tokens of a request that fits only while one model has all the KV memory."""


class FromNow(MachineReadings):
    """This machine, without what other tests of this process hold in MLX already."""

    def __init__(self) -> None:
        super().__init__()
        self.clear_cache()
        self._before = super().read("device").used_bytes

    def read(self, pool):
        found = super().read(pool)
        used = max(0, found.used_bytes - self._before)
        return Reading(found.physical_bytes, used, min(found.cached_bytes, used), found.free_bytes)


@pytest.fixture(scope="module")
def server():
    settings = Settings(
        memory={"physical_bytes": 2560 * MIB, "activation_bytes": 64 * MIB},  # a cap of 512 MiB
        telemetry={"sample_seconds": 0},
        engine={"chain": "always", "pack": "never", "event_buffer": BUFFERED},
    )
    plugins = load_plugins()
    emitter = SinkEmitter([])
    slots = SlotManager(settings, plugins.family_for, emitter, FromNow())
    for name, path in plugins.checkpoints().items():
        slots.add(name, path)
    with BackgroundServer(create_app(slots, settings, emitter)) as server:
        server.slots = slots
        yield server
    slots.close()


def ask(server, model, question=QUESTION, **fields):
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 300,
        **fields,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def text_of(answer) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def long_stream(slot):
    """An answer of ``STREAM_TOKENS`` tokens whose row pauses soon after its reader does."""
    return slot.engine.submit(
        GenerationRequest(
            id="long",
            prompt=Prompt(slot.codec.encode_text("Once upon a time")),
            parser=PlainParser(),
            max_tokens=STREAM_TOKENS,
            sampling=SamplingParams(temperature=0.0),
            ignore_stop_ids=True,
        )
    )


def text_of_stream(events) -> str:
    events = list(events)
    assert (events[-1].reason, events[-1].usage.completion_tokens) == ("length", STREAM_TOKENS)
    return "".join(delta.text for event in events[:-1] for delta in event.deltas)


def grants(server) -> dict[str, int]:
    return {slot.name: slot.grant_bytes for slot in server.slots.slots()}


def test_one_model_loads_while_the_other_serves_and_shares_move_and_come_back(server) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert sorted(model["id"] for model in listed) == sorted([A, B])  # before either is in memory
    undisturbed = text_of(ask(server, A))
    alone = grants(server)
    assert list(alone) == [A]
    assert text_of(ask(server, A, max_tokens=LONG)) == undisturbed  # it fits now

    slot = server.slots.get(A)
    whole = text_of_stream(long_stream(slot))
    stream = iter(long_stream(slot))
    events = [next(stream) for _ in range(4)]
    load = server.slots.load_known(B)
    while not load.done():  # it goes on while B loads, but not to its end
        if len(events) < STREAM_TOKENS // 2:
            events.append(next(stream))
        else:
            time.sleep(0.01)
    assert load.exception() is None
    shared = grants(server)
    assert sorted(shared) == sorted([A, B])
    assert shared[A] < alone[A]
    assert sum(shared.values()) <= server.slots.memory.budget()
    assert slot.engine.status().running == 1  # and it runs still

    refused = ask(server, A, max_tokens=LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "capacity_exhausted")
    assert int(refused.headers["retry-after"]) >= 1
    assert "Paris" in text_of(ask(server, B, "What is the capital of France?"))
    assert text_of(ask(server, A)) == undisturbed
    assert text_of_stream([*events, *stream]) == whole

    server.slots.unload(B)
    assert grants(server) == alone
    assert text_of(ask(server, A, max_tokens=LONG)) == undisturbed
    assert "Paris" in text_of(ask(server, B, "What is the capital of France?"))  # and it comes back


def test_a_model_that_its_share_would_starve_is_refused_with_503(server) -> None:
    server.slots.unload(B)
    before = grants(server)
    assert server.slots.memory.ledger.reserve("another program", 320 * MIB, "media")
    pinned = server.slots.acquire(A)
    try:
        refused = ask(server, B)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_does_not_fit")
        assert int(refused.headers["retry-after"]) >= 1
        assert grants(server) == before
    finally:
        server.slots.release(pinned)
        server.slots.memory.ledger.release("another program")
