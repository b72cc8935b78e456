"""Both demo checkpoints under a cap that one setting lowers: one loads while the other serves, over HTTP."""

from __future__ import annotations

import threading

import httpx
import pytest

from darkbloom_core.memory import MachineReadings, Reading
from darkbloom_core.plugins import load_plugins
from darkbloom_core.server import BackgroundServer, create_app
from darkbloom_core.settings import Settings
from darkbloom_core.slots import SlotManager
from darkbloom_core.telemetry import SinkEmitter

MIB = 1024**2
A, B = "demo/gpt-oss", "demo/gemma4"
QUESTION = "List the numbers from 98 to 103."
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
        engine={"chain": "always", "pack": "never"},
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


def grants(server) -> dict[str, int]:
    return {slot.name: slot.grant_bytes for slot in server.slots.slots()}


def test_one_model_loads_while_the_other_serves_and_shares_move_and_come_back(server) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert sorted(model["id"] for model in listed) == sorted([A, B])  # before either is in memory
    undisturbed = text_of(ask(server, A))
    alone = grants(server)
    assert list(alone) == [A]
    assert text_of(ask(server, A, max_tokens=LONG)) == undisturbed  # it fits now

    texts: list[str] = []
    go_on = threading.Event()
    go_on.set()

    def keep_asking() -> None:
        while go_on.is_set():
            texts.append(text_of(ask(server, A)))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    assert "Paris" in text_of(ask(server, B, "What is the capital of France?"))  # waits for its load
    shared = grants(server)
    go_on.clear()
    asking.join(60)
    assert len(texts) >= 2
    assert set(texts) == {undisturbed}
    assert sorted(shared) == sorted([A, B])
    assert shared[A] < alone[A]
    assert sum(shared.values()) <= server.slots.memory.budget()

    refused = ask(server, A, max_tokens=LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "capacity_exhausted")
    assert int(refused.headers["retry-after"]) >= 1
    assert text_of(ask(server, A)) == undisturbed

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
