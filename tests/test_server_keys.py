"""A server that needs keys: who gets in, by which clients, and what a key may not see or take of another's."""

import contextlib
import hashlib
import hmac
import http.client
import logging
import threading
import time

import anthropic
import httpx
import openai
import pytest
from darkbloom_dialects import server_routes
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from toy_server import ToyServer

from darkbloom_core.cli._chat import _server as chat_server
from darkbloom_core.errors import SettingsError, SetupError, Unauthorized
from darkbloom_core.server import BackgroundServer, OpenRoute, check_address, create_app
from darkbloom_core.server._keys import KeyRing
from darkbloom_core.settings import ApiKey, Settings
from darkbloom_core.slots import SlotManager
from darkbloom_core.telemetry import SinkEmitter

KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "hasty")}
WRONG = "wrong-0123456789abcdef"
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "HELLO"}], "max_tokens": 3}
MESSAGE = {**CHAT, "max_tokens": 3}
PAGE = "https://chat.example.org"
LIMITS = {
    "cors_origins": [PAGE],
    "body_bytes_limit": 100_000,
    "key_concurrency": 2,
    "key_requests_per_minute": 60,
    "key_burst": 40,
}


async def page(request):
    return PlainTextResponse("a page")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tables = {"keys": KEYS, "server": LIMITS, "options": {"dialects": {}}}
    routes = [
        *server_routes(Settings(**tables)),
        OpenRoute("/", page),
        Route("/metrics", page),
        OpenRoute("/v1/models", page),
    ]
    models = {"toy": {}, "slow": {"seconds": 0.02}}
    folder = tmp_path_factory.mktemp("keys")
    with ToyServer(folder, models, plugin_routes=routes, **tables).running() as server:
        yield server


def client(server, name=None, **headers) -> httpx.Client:
    if name is not None:
        headers["Authorization"] = f"Bearer {KEYS[name]}"
    return httpx.Client(base_url=server.url, headers=headers, timeout=20)


def path_of(route) -> str:
    return route.path.replace("{name:path}", "x").replace("{rest:path}", "x").replace("{name}", "x")


def wait_for(condition, seconds=5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- who gets in ------------------------------------------------------------------------


def test_without_a_key_only_open_routes_answer(server) -> None:
    with client(server) as nobody:
        opened = set()
        for route in [*server.app.routes, Route("/nowhere", page)]:
            for method in {"GET", "POST", *(route.methods or ())}:
                answer = nobody.request(method, path_of(route), json=CHAT if method == "POST" else None)
                if answer.status_code != 401:
                    opened.add((method, route.path))
                else:
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert answer.headers["x-request-id"]
        assert opened == {
            (method, path) for method in ("GET", "HEAD") for path in ("/", "/health/live", "/health/ready")
        }


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {WRONG}"},
        {"Authorization": f"Bearer {KEYS['alice']}x"},
        {"Authorization": f"Bearer {KEYS['alice'][:-1]}"},
        {"Authorization": f"Basic {KEYS['alice']}"},
        {"Authorization": KEYS["alice"]},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer alice"},
        {"x-api-key": WRONG},
        {"x-api-key": ""},
        {"x-api-key": b"caf\xe9-0123456789abcdef"},
        {"api-key": KEYS["alice"]},
        {"cookie": f"Authorization=Bearer {KEYS['alice']}"},
    ],
)
def test_what_is_no_key_of_the_server_is_401_and_is_not_repeated(server, headers, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    with client(server, **headers) as stranger:
        answer = stranger.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for shown in ("0123456789abcdef", "alice"):
        assert shown not in answer.text
        assert not [line for line in caplog.messages if shown in line and "httpcore" not in line]


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEYS['bob']}"},
        {"Authorization": f"bearer  {KEYS['bob']}"},
        {"x-api-key": KEYS["bob"]},
        {"Authorization": f"Bearer {WRONG}", "x-api-key": KEYS["bob"]},
    ],
)
def test_a_key_may_be_shown_in_either_header(server, headers) -> None:
    with client(server, **headers) as bob:
        assert bob.get("/v1/models").json()["object"] == "list"
        assert bob.get("/nowhere").status_code == 404


def test_the_official_clients_get_in_with_a_key_and_are_told_without(server) -> None:
    def ask_openai(key):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            return client.chat.completions.create(**CHAT)

    def ask_anthropic(key):
        with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
            return client.messages.create(**MESSAGE)

    assert ask_openai(KEYS["alice"]).usage.completion_tokens == 3
    assert ask_anthropic(KEYS["alice"]).usage.output_tokens == 3
    with pytest.raises(openai.AuthenticationError):
        ask_openai(WRONG)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        ask_anthropic(WRONG)
    assert (refused.value.body["type"], refused.value.body["error"]["type"]) == (
        "error",
        "authentication_error",
    )


def test_a_key_is_looked_at_before_a_body_is_read(server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.background.port, timeout=5)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", "1000000")
    connection.putheader("expect", "100-continue")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


def test_readiness_is_only_a_status_to_those_without_a_key(server) -> None:
    with client(server) as nobody, client(server, "alice") as alice:
        assert nobody.get("/health/live").json() == {"status": "live"}
        assert nobody.get("/health/ready").json() == {"status": "ready"}
        assert [slot["model"] for slot in alice.get("/health/ready").json()["slots"]] == ["slow", "toy"]


def test_every_key_is_compared_whole_and_in_constant_time(monkeypatch) -> None:
    compared = []

    def counting(left, right):
        compared.append((left, right))
        return hmac_compare(left, right)

    hmac_compare = hmac.compare_digest
    ring = KeyRing([ApiKey(name, key) for name, key in KEYS.items()])
    monkeypatch.setattr(hmac, "compare_digest", counting)
    assert ring.holder(Headers({"x-api-key": KEYS["alice"]})) == "alice"
    with pytest.raises(Unauthorized):
        ring.holder(Headers({"x-api-key": "x"}))
    assert len(compared) == 2 * len(KEYS)
    assert {len(side) for pair in compared for side in pair} == {hashlib.sha256().digest_size}


def test_an_address_that_others_can_reach_is_only_served_with_keys() -> None:
    exposed = {"host": "0.0.0.0", "port": 0}
    with pytest.raises(SettingsError, match="can be reached from other machines"):
        check_address(Settings(server=exposed))
    check_address(Settings(server=exposed, keys=KEYS))
    server, telemetry = {"cors_origins": ["*"]}, {"sample_seconds": 0}
    settings, emitter = Settings(keys=KEYS, server=server, telemetry=telemetry), SinkEmitter()
    slots = SlotManager(settings, lambda config: pytest.fail("nothing is loaded"), emitter)
    with contextlib.closing(slots):
        with pytest.raises(SettingsError, match="can be reached from other machines"):
            BackgroundServer(create_app(slots, Settings(), emitter), "0.0.0.0")
        with BackgroundServer(create_app(slots, settings, emitter), "0.0.0.0") as running:
            answer = httpx.get(f"http://127.0.0.1:{running.port}/v1/models", headers={"Origin": PAGE})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "*")


def test_the_chat_command_shows_the_key_of_its_variable(server, monkeypatch) -> None:
    monkeypatch.setenv("DARKBLOOM_API_KEY", KEYS["alice"])
    with chat_server(None, None, server.url, None) as (chat, model):
        pieces = chat.stream(model, CHAT["messages"])
        assert next(pieces)
        pieces.close()
    monkeypatch.setenv("DARKBLOOM_API_KEY", WRONG)
    with (
        pytest.raises(SetupError, match=r"not one of this server's \(set DARKBLOOM_API_KEY"),
        chat_server(None, None, server.url, None),
    ):
        pass


# --- pages of other origins -----------------------------------------------------------------


def preflight(server, origin, method="POST", path="/v1/chat/completions", **headers):
    asked = {"Origin": origin, "Access-Control-Request-Method": method, **headers}
    return httpx.options(server.url + path, headers=asked)


def test_a_preflight_of_a_page_that_may_needs_no_key(server) -> None:
    sent = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang"}
    for path, method in (
        ("/v1/chat/completions", "POST"),
        ("/v1/responses/x", "DELETE"),
        ("/nowhere", "GET"),
    ):
        answer = preflight(server, PAGE, method, path, **sent)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert method in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == sent["Access-Control-Request-Headers"]
        assert "Origin" in answer.headers["vary"]
        assert answer.headers["x-request-id"]
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["https://other.example.org", "http://chat.example.org", f"{PAGE}:8443", "null"]
)
def test_a_page_of_another_origin_may_read_nothing(server, origin) -> None:
    refused = preflight(server, origin)
    with client(server, "alice", Origin=origin) as alice:
        answer = alice.get("/v1/models")
    assert (refused.status_code, answer.status_code) == (400, 200)
    assert "access-control-allow-origin" not in {**refused.headers, **answer.headers}
    assert answer.headers["vary"] == "Origin"


def test_a_page_that_may_reads_streams_and_errors_too(server) -> None:
    def read(name, path, **body):
        with client(server, name, Origin=PAGE) as page:
            answer = page.post(path, **body)
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"] == "x-request-id, retry-after"
        return answer.status_code

    chat = "/v1/chat/completions"
    assert read("alice", chat, json=CHAT) == 200
    assert read("alice", chat, json={**CHAT, "stream": True}) == 200
    assert read("alice", chat, json={}) == 400
    assert read(None, chat, json=CHAT) == 401
    assert read("alice", "/nowhere") == 404
    assert read("alice", chat, content=b"x" * 200_000) == 413


def test_without_settings_no_page_of_another_origin_may_read_anything(toy_server) -> None:
    with client(toy_server, Origin=PAGE) as page:
        answers = [page.get("/v1/models"), page.get("/nowhere"), preflight(toy_server, PAGE)]
    assert [answer.status_code for answer in answers] == [200, 404, 405]
    assert not [name for answer in answers for name in answer.headers if "access-control" in name]


# --- what a key may not see of another's ---------------------------------------------------


def test_prompts_are_reused_only_within_a_key_whatever_scope_is_named(server) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "SHARED BEGINNING " * 35}]}

    def cached(name, **headers):
        with client(server, name, **headers) as asking:
            usage = asking.post("/v1/chat/completions", json=body).json()["usage"]
        return usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)

    def is_reused(name, **headers):
        """At once, or later: whether a hit pays is measured, and here all is small."""
        return any(cached(name, **headers) for _ in range(5))

    assert cached("alice") == 0
    assert is_reused("alice")
    assert cached("bob") == cached("bob", **{"X-Darkbloom-Scope": "alice"}) == 0
    scope = {"X-Darkbloom-Scope": "bob"}
    assert cached("alice", **scope) == 0
    assert is_reused("alice", **scope)


def test_responses_are_kept_for_their_own_key_alone(server) -> None:
    ask = {"model": "toy", "input": "HELLO", "max_output_tokens": 3}
    with client(server, "alice") as alice, client(server, "bob") as bob:
        kept = alice.post("/v1/responses", json=ask).json()["id"]
        for name in (kept, "resp_none"):
            found = {
                bob.get(f"/v1/responses/{name}").status_code,
                bob.get(f"/v1/responses/{name}/input_items").status_code,
                bob.post(f"/v1/responses/{name}/cancel").status_code,
                bob.delete(f"/v1/responses/{name}").status_code,
            }
            assert found == {404}
            going_on = bob.post("/v1/responses", json={**ask, "previous_response_id": name})
            assert (going_on.status_code, going_on.json()["error"]["param"]) == (400, "previous_response_id")
        assert alice.get(f"/v1/responses/{kept}").status_code == 200
        assert alice.post("/v1/responses", json={**ask, "previous_response_id": kept}).status_code == 200


# --- what a key may take -------------------------------------------------------------------


def test_one_key_has_so_many_requests_at_once_can_cancel_them_and_leaves_others_alone(server) -> None:
    slow = {"model": "slow", "input": "HELLO", "max_output_tokens": 3000, "stream": True}
    names = []

    def hold():
        with client(server, "bob") as bob, bob.stream("POST", "/v1/responses", json=slow) as answer:
            for line in answer.iter_lines():
                if '"response.created"' in line and line.startswith("data:"):
                    names.append(line.partition('"id":"')[2].partition('"')[0])

    held = [threading.Thread(target=hold) for _ in range(2)]
    for thread in held:
        thread.start()
    wait_for(lambda: len(names) == 2)
    with client(server, "bob") as bob, client(server, "alice") as alice:
        refused = bob.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        other = bob.post("/v1/messages", json=MESSAGE)
        assert (other.status_code, other.json()["error"]["type"]) == (429, "rate_limit_error")
        assert alice.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert alice.post(f"/v1/responses/{names[0]}/cancel").status_code == 404
        for name in names:
            assert bob.post(f"/v1/responses/{name}/cancel").status_code == 200
        for thread in held:
            thread.join(5)
        assert bob.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_one_key_asks_so_often_and_leaves_others_alone(server) -> None:
    with client(server, "hasty") as hasty, client(server, "alice") as alice:
        statuses = [hasty.post("/v1/completions", content=b"{").status_code for _ in range(60)]
        first = statuses.index(429)
        assert set(statuses[:first]) == {400}
        refused = hasty.post("/v1/completions", content=b"{")
        if refused.status_code != 429:  # a token has come since
            refused = hasty.post("/v1/completions", content=b"{")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert hasty.get("/v1/models").status_code == 200
        assert alice.post("/v1/chat/completions", json=CHAT).status_code == 200
