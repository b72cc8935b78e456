"""Thousands of random requests to every route of a real server: no fault of its own, no hang, nothing left behind.

``FUZZ_SEED`` begins elsewhere, ``FUZZ_CASE`` sends one case alone. A failure tells its case and the
smallest body that was found to fail in the same way.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import darkbloom_dialects
import darkbloom_webui
import httpx
import psutil
import pytest
from darkbloom_dialects._anthropic_bodies import CountBody, MessagesBody
from darkbloom_dialects._responses_bodies import ResponsesBody
from fuzz_bodies import ID, Asked, Drawing, damaged, mutated, shrunk
from fuzz_values import CHAT, COMPLETION, HEADERS, MESSAGES, RESPONSES, VALUES
from soak import keep, length
from toy_server import ToyServer

from darkbloom_core.server._bodies import ChatCompletionBody, CompletionBody
from darkbloom_core.settings import Settings

FULL, SAMPLE = 20_000, 1_000
CLIENTS = 8
ANSWER_SECONDS = 30.0
ERROR_BYTES = 4_096
MOST_BYTES = 1_000_000
POOLED = 8
"""How many threads the pools of a server may still have begun after the first requests."""
REPEATED = 12
"""A whole Responses stream repeats what was asked three times, escaped; nothing else grows with the body."""

DRAWINGS = {
    "/v1/chat/completions": Drawing(ChatCompletionBody, CHAT),
    "/v1/completions": Drawing(CompletionBody, COMPLETION),
    "/v1/messages": Drawing(MessagesBody, MESSAGES),
    "/v1/messages/count_tokens": Drawing(CountBody, MESSAGES),
    "/v1/responses": Drawing(ResponsesBody, RESPONSES),
}
ENDS = {
    "/v1/chat/completions": r"data: \[DONE\]",
    "/v1/completions": r"data: \[DONE\]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": r"event: response\.(completed|incomplete)",
}
OURS = ("server_error", "api_error", "internal_error", "generation_failed")
"""Words for a fault of the server's own in any dialect."""

SEED = os.environ.get("FUZZ_SEED", "darkbloom")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    plain = {"context_tokens": 512, "fits_formats": False}  # a toy has no token for the braces of JSON
    models = {
        "toy/plain": plain,
        "toy/stops": {**plain, "stop_ids": [40, 41, 42, 43, 44, 45]},
        "toy/seeing": {**plain, "sees": True},
        "toy/small": {**plain, "context_tokens": 32},
    }
    tables = {
        "server": {"body_bytes_limit": 200_000},
        "engine": {"default_max_tokens": 16, "chain": "always", "pack": "never", "waiting_limit": 200},
        "options": {"dialects": {"stored_responses": 50}},
    }
    routes = [*darkbloom_dialects.server_routes(Settings(**tables)), *darkbloom_webui.server_routes()]
    folder = tmp_path_factory.mktemp("toys")
    with ToyServer(folder, models, plugin_routes=routes, **tables).running() as server:
        yield server


class Cases:
    """The ``n``-th request to an application's routes."""

    def __init__(self, app) -> None:
        self._others = [route for route in app.routes if route.path not in DRAWINGS]
        paths = {route.path for route in app.routes}
        assert paths >= DRAWINGS.keys()

    def case(self, number: int) -> Asked:
        chance = random.Random(f"{SEED} {number}")
        if chance.random() < 0.08:
            return self._other(chance)
        path = chance.choice(sorted(DRAWINGS))
        body = DRAWINGS[path].body(chance)
        if chance.random() < 0.25:
            body |= self._of_a_family(path, chance)
        kind = chance.random()
        if kind < 0.35:
            body = mutated(body, chance)
        if isinstance(body, dict) and chance.random() < 0.4:
            body["stream"] = True
        content = damaged(json.dumps(body).encode(), chance) if kind > 0.93 else body
        method = "POST" if chance.random() < 0.99 else chance.choice(("GET", "PUT", "DELETE", "OPTIONS"))
        headers = tuple(chance.choice(HEADERS).items()) if chance.random() < 0.1 else ()
        then = self._then(chance) if path == "/v1/responses" else ()
        return Asked(method, path, content, headers, chance.random() < 0.03, then)

    def _of_a_family(self, path: str, chance: random.Random) -> dict[str, Any]:
        """A real codec reads the conversation; mostly that is all, since no context holds such an answer."""
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        tokens = chance.choice((1, 2, 4, 8)) if chance.random() < 0.2 else 10_000_000
        return {"model": chance.choice(("demo/gpt-oss", "demo/gemma4")), limit: tokens, "n": 1}

    def _then(self, chance: random.Random) -> tuple[Asked, ...]:
        """What is done with a response that was kept, in any order."""
        one = f"/v1/responses/{ID}"
        again = DRAWINGS["/v1/responses"].body(chance) | {"previous_response_id": ID, "model": "toy/plain"}
        ways = (
            Asked("POST", "/v1/responses", again),
            Asked("GET", one),
            Asked("GET", f"{one}/input_items?limit=2&order={chance.choice(('asc', 'desc', 'x'))}"),
            Asked("POST", f"{one}/cancel"),
            Asked("DELETE", one),
        )
        return tuple(chance.sample(ways, chance.choice((0, 0, 1, 3, 5))))

    def _other(self, chance: random.Random) -> Asked:
        words = ("toy/plain", "x", "resp_1", "%00", "..%2f..%2fetc", "é", "a" * 300, "1", "%f0%9f")
        route = chance.choice(self._others)
        path = re.sub(r"\{[^}]*\}", lambda _: chance.choice(words), route.path)
        query = ("", "", "?limit=x", "?limit=5&order=asc&after=%ff", "?stream=true", "?" + "a=b&" * 200)
        method = chance.choice((*sorted(route.methods or ("POST",)), "POST", "GET"))
        body = chance.choice((None, None, *VALUES)) if method != "GET" else None
        return Asked(method, path + chance.choice(query), body)


def fault(asked: Asked, status: int, content_type: str, data: bytes) -> str | None:
    """What is wrong with an answer, if anything is."""
    if asked.method == "HEAD" and status < 500:
        return None
    if status >= 500 and status != 501:
        return f"status {status}: {data[:300]!r}"
    if status >= 400:
        if len(data) > ERROR_BYTES:
            return f"an error of {len(data)} bytes"
        return None if message_of(data) else "an error without a message"
    if len(data) > MOST_BYTES + REPEATED * len(asked.content):
        return f"an answer of {len(data)} bytes"
    if not content_type.startswith("text/event-stream"):
        if content_type == "application/json":
            json.loads(data)
        return None
    text = data.decode()
    *_, last = text.strip().split("\n\n")
    if any(f'"{word}"' in last for word in OURS):
        return "a stream that tells of a fault of the server"
    if not re.match(ENDS[asked.path], last) and '"error"' not in last:
        return "a stream without its end"
    return None


def message_of(data: bytes) -> Any:
    return json.loads(data)["error"]["message"]


def sent(client: httpx.Client, asked: Asked) -> tuple[int, str | None]:
    """The status and what is wrong, if anything is; status 0 for an answer that was not read to its end."""
    try:
        status, data, wrong = answered(client, asked)
        if asked.then and status == 200 and wrong is None and (found := re.search(rb"resp_[0-9a-f]+", data)):
            for each in asked.then:
                _, _, wrong = answered(client, each.about(found[0].decode()))
                if wrong is not None:
                    return status, f"then, for {each}, {wrong}"
        return status, wrong
    except httpx.HTTPError as error:
        return 0, f"{type(error).__name__}: {error}"
    except ValueError as error:
        return 0, f"an answer that cannot be read: {error}"


def answered(client: httpx.Client, asked: Asked) -> tuple[int, bytes, str | None]:
    began = time.monotonic()
    most = 2 * MOST_BYTES + 2 * REPEATED * len(asked.content)
    headers = {"content-type": "application/json", **dict(asked.headers)}
    with client.stream(asked.method, asked.path, content=asked.content, headers=headers) as answer:
        data = b""
        for part in answer.iter_raw():
            data += part
            if asked.leaves:
                return 0, b"", None
            if len(data) > most or time.monotonic() - began > ANSWER_SECONDS:
                return 0, b"", f"no end after {len(data)} bytes and {time.monotonic() - began:.0f} s"
        kind = answer.headers.get("content-type", "")
        return answer.status_code, data, fault(asked, answer.status_code, kind, data)


def is_for_a_family(asked: Asked) -> bool:
    return isinstance(asked.body, dict) and str(asked.body.get("model")).startswith("demo/")


class Run:
    """Sends cases from several threads at once and counts what comes back."""

    def __init__(self, toys: str, families: str, case: Callable[[int], Asked]) -> None:
        self._toys, self._families, self._case = toys, families, case
        self.statuses: Counter[int] = Counter()
        self.by_path: Counter[tuple[str, int]] = Counter()
        self.faults: dict[int, str] = {}
        self._lock = threading.Lock()

    def send(self, first: int, last: int) -> None:
        numbers = count(first)

        def work() -> None:
            with self._client(self._toys) as toys, self._client(self._families) as families:
                while (number := next(numbers)) < last and not self.faults:
                    asked = self._case(number)
                    status, wrong = sent(families if is_for_a_family(asked) else toys, asked)
                    with self._lock:
                        self.statuses[status] += 1
                        self.by_path[asked.path.partition("?")[0], status] += 1
                        if wrong is not None:
                            self.faults[number] = wrong

        threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, url: str) -> httpx.Client:
        return httpx.Client(base_url=url, timeout=ANSWER_SECONDS)

    def fail_if_faulty(self) -> None:
        if not self.faults:
            return
        number = min(self.faults)
        wrong, asked = self.faults[number], self._case(number)
        with self._client(self._families if is_for_a_family(asked) else self._toys) as client:

            def still_fails(body: Any) -> bool:
                return sent(client, replace(asked, body=body))[1] is not None

            if asked.body is None or not still_fails(asked.body):
                pytest.fail(f"case {number} once had {wrong}, not again: {asked}")
            least = replace(asked, body=shrunk(asked.body, still_fails))
        pytest.fail(f"case {number} has {wrong}: {least}\nfirst seen as {asked}")


def held(server, families) -> dict[str, int]:
    """What the servers at rest hold."""
    server.wait_until_idle(20)
    families.wait_until_idle(20)
    return {
        "bytes reserved": server.slots.memory.ledger.outstanding_bytes("device"),
        "threads": threading.active_count(),
        "files": psutil.Process().num_fds(),
        "running": sum(slot.engine.status().running for slot in server.slots.slots()),
    }


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_request_makes_the_server_fail(server, live_server) -> None:
    total = length(FULL, SAMPLE)
    run = Run(server.url, live_server.url, Cases(server.app).case)
    only = os.environ.get("FUZZ_CASE")
    if only is not None:
        run.send(int(only), int(only) + 1)
        run.fail_if_faulty()
        return
    run.send(0, total // 5)  # threads and caches that live as long as the server are there by then
    run.fail_if_faulty()
    before = held(server, live_server)
    began = time.monotonic()
    run.send(total // 5, total)
    run.fail_if_faulty()
    seconds = time.monotonic() - began
    after = held(server, live_server)
    assert after["threads"] <= before["threads"] + POOLED
    assert after["files"] <= before["files"] + 2
    assert after["bytes reserved"] == before["bytes reserved"]
    assert after["running"] == 0
    good = sum(number for status, number in run.statuses.items() if 200 <= status < 300)
    assert good >= total / 5, run.statuses
    for path in DRAWINGS:
        assert run.by_path[path, 200] > total / 100, (path, run.by_path)
    told = ", ".join(f"{number:,} x {status or 'left'}" for status, number in sorted(run.statuses.items()))
    keep(
        "fuzz",
        f"{total:,} requests: {told}; no 500, threads {before['threads']} before and {after['threads']} after, "
        f"files {before['files']} and {after['files']}, nothing reserved",
        {
            "requests": total,
            "requests_per_second": round((total - total // 5) / seconds, 1),
            "statuses": {str(status): number for status, number in sorted(run.statuses.items())},
            "by_path": {
                f"{path} {status}": number
                for (path, status), number in sorted(run.by_path.items())
                if path in DRAWINGS
            },
            "before": before,
            "after": after,
        },
    )


def test_the_same_case_is_the_same_request(server) -> None:
    one, again = Cases(server.app), Cases(server.app)
    assert [one.case(number) for number in range(300)] == [again.case(number) for number in range(300)]


def test_what_fails_is_told_as_the_smallest_that_fails() -> None:
    body = mutated({**CHAT, "temperature": 0.5, "bad": {"a": [1, 2, {"worse": "x" * 100}]}}, random.Random(1))
    assert "worse" in json.dumps(body)
    assert shrunk(body, lambda less: "worse" in json.dumps(less)) == {"bad": {"a": [{"worse": 0}]}}
