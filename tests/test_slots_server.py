"""What clients see while models load, over HTTP: waits, refusals, and names that are not served."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from toy_machine import ToyMachine

from darkbloom_core.contracts import RequestFinished, RequestRefused, RequestStarted
from darkbloom_core.errors import CheckpointError
from darkbloom_core.plugins import load_plugins
from darkbloom_core.server import BackgroundServer, create_app


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    toy = ToyMachine(tmp_path_factory.mktemp("toys"))
    with BackgroundServer(create_app(toy.slots, toy.settings, toy.emitter)) as server:
        toy.url = server.url
        yield toy
    toy.close()


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def body(model: str) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "X"}], "max_tokens": 4}


def ask(toy: ToyMachine, model: str) -> httpx.Response:
    return httpx.post(f"{toy.url}/v1/chat/completions", json=body(model), timeout=60)


@pytest.fixture
def cold(toy, request):
    """A model of which nobody knows whether it loads before the test opens the gate."""
    toy.family.gate.clear()
    toy.family.entered.clear()
    toy.sink.take()
    name = toy.add(request.node.name, 1)
    yield name
    toy.family.gate.set()
    wait_for(lambda: not toy.slots._futures)
    toy.slots.unload(name)


def test_whoever_asks_for_a_model_that_loads_waits_for_it_and_is_served(toy, cold):
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, toy, cold) for _ in range(5)]
        assert toy.family.entered.wait(20)
        late = pool.submit(ask, toy, cold)
        time.sleep(0.1)
        assert not any(each.done() for each in [*asked, late])
        toy.family.gate.set()
        assert [each.result(60).status_code for each in [*asked, late]] == [200] * 6
    assert toy.family.loads.count(cold) == 1


def test_a_client_that_leaves_while_its_model_loads_is_dropped_and_the_load_goes_on(toy, cold):
    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{toy.url}/v1/chat/completions", json=body(cold), timeout=0.3)

    leaving = threading.Thread(target=leave)
    leaving.start()
    assert toy.family.entered.wait(20)
    leaving.join(20)
    wait_for(lambda: any(isinstance(event, RequestRefused) for event in toy.sink.events))
    toy.family.gate.set()
    assert ask(toy, cold).status_code == 200
    assert toy.family.loads.count(cold) == 1
    events = toy.sink.take(RequestStarted, RequestFinished, RequestRefused)
    assert [(type(event), getattr(event, "status", None)) for event in events] == [
        (RequestRefused, 499),  # counted, and nothing else
        (RequestStarted, None),
        (RequestFinished, 200),
    ]
    wait_for(lambda: toy.slots.get(cold).pins == 0)


def test_what_no_family_reads_is_neither_listed_nor_found(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(toy.slots, "_family_for", load_plugins().family_for)
    for number, config in enumerate(({"model_type": "mamba9"}, {"model_type": "gemma4_assistant"}, {})):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError):
            toy.slots.add(f"unsupported {number}", path)
        answer = ask(toy, f"unsupported {number}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    listed = [model["id"] for model in httpx.get(f"{toy.url}/v1/models").json()["data"]]
    assert not any(name.startswith("unsupported") for name in listed)
