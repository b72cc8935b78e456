"""What every request gets, whatever it asks: an id, a bounded body, an answer in one shape."""

import http.client
import json
import socket

import httpx
import openai
import pytest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from toy_server import ToyServer

from darkbloom_core.contracts import RequestRefused
from darkbloom_core.errors import QueueFull
from darkbloom_core.server import generation_service, request_context


@pytest.fixture(scope="module")
def http_client(toy_server):
    with httpx.Client(base_url=toy_server.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/v2/models", "/v1/embedding"]
)
def test_an_unknown_route_is_404_in_the_common_shape(http_client, path) -> None:
    answer = http_client.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "route_not_found"
    assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/health/live", "GET"),
        ("OPTIONS", "/v1/models", "GET"),
    ],
)
def test_a_wrong_method_is_405_and_says_which_are_right(http_client, method, path, allowed) -> None:
    answer = http_client.request(method, path)
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert allowed in answer.headers["allow"]


def test_embeddings_are_501_and_clients_do_not_try_again(toy_server) -> None:
    toy_server.sink.take()
    with (
        openai.OpenAI(base_url=f"{toy_server.url}/v1", api_key="none", max_retries=2) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.embeddings.create(model="toy/plain", input="hello")
    assert (caught.value.status_code, caught.value.code) == (501, "not_implemented")
    assert "no embeddings" in caught.value.message
    assert toy_server.sink.take(RequestRefused) == [RequestRefused(status=501, error_code="not_implemented")]


def test_an_id_comes_back(http_client) -> None:
    given = "My request / 17"
    assert http_client.get("/health/live", headers={"x-request-id": given}).headers["x-request-id"] == given
    assert http_client.get("/nowhere", headers={"x-request-id": given}).headers["x-request-id"] == given
    assert (
        http_client.get("/v1/models", headers={"x-request-id": "x" * 256}).headers["x-request-id"]
        == "x" * 256
    )


@pytest.mark.parametrize("given", [None, "", "x" * 257, "tab\there", "caf\u00e9", "del\x7f"])
def test_a_missing_or_unfit_id_is_replaced(http_client, given) -> None:
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    answers = [http_client.get("/health/live", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert answers[0] != answers[1]
    assert all(answer.startswith("req_") and answer.isascii() for answer in answers)


def test_a_body_at_the_limit_passes_and_one_byte_more_does_not(http_client) -> None:
    def padded(size):
        body = json.dumps({"model": "toy/none", "messages": [{"role": "user", "content": "x"}]})
        return body + " " * (size - len(body))

    assert http_client.post("/v1/chat/completions", content=padded(100_000)).status_code == 404
    answer = http_client.post("/v1/chat/completions", content=padded(100_001))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert "100000" in answer.json()["error"]["message"]


def test_a_body_of_unknown_length_is_counted(http_client) -> None:
    answer = http_client.post("/v1/chat/completions", content=(b"x" * 1000 for _ in range(150)))
    assert answer.status_code == 413


def test_a_client_that_asks_first_is_told_before_it_sends(toy_server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", toy_server.background.port, timeout=5)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", "1000000")
    connection.putheader("expect", "100-continue")
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_refused_upload_does_not_break_the_next_request(http_client) -> None:
    answer = http_client.post("/v1/chat/completions", content=b"x" * 50_000_000)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert http_client.get("/health/live").status_code == 200


def test_each_refusal_is_told_once(http_client, toy_server) -> None:
    toy_server.sink.take(RequestRefused)
    http_client.get("/nowhere")
    http_client.post("/v1/chat/completions", content=b"{")
    http_client.post("/v1/chat/completions", content=b"x" * 200_000)
    http_client.post(
        "/v1/chat/completions", json={"model": "secret", "messages": [{"role": "user", "content": "x"}]}
    )
    assert toy_server.sink.take(RequestRefused) == [
        RequestRefused(status=404, error_code="route_not_found"),
        RequestRefused(status=400, error_code="invalid_value"),
        RequestRefused(status=413, error_code="body_too_large"),
        RequestRefused(status=404, error_code="model_not_found"),
    ]


def test_something_that_is_not_http_does_no_harm(toy_server, http_client) -> None:
    with socket.create_connection(("127.0.0.1", toy_server.background.port), timeout=5) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert http_client.get("/health/live").status_code == 200


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A server with routes of a plugin: one that works, and some that break in different ways."""

    async def models(request):
        service = generation_service(request.app)
        body = await request.body()
        names = ",".join(slot.name for slot in service.slots.slots())
        return PlainTextResponse(f"{names} {len(body)} {request_context(request.scope).request_id}")

    async def breaks(request):
        raise ValueError("the secret of the request")

    async def teapot(request):
        raise HTTPException(418, "I am a teapot")

    async def breaks_late(request):
        async def parts():
            yield b"begun"
            raise ValueError("too late")

        return StreamingResponse(parts())

    async def other_dialect(request):
        request_context(request.scope).error_body = lambda answer: {"wrong": [answer.status, answer.code]}
        raise QueueFull("not now") if request.method == "GET" else ValueError("the secret of the request")

    async def shadow(request):
        return PlainTextResponse("not the core's")

    routes = [
        Route("/plugin/models", models, methods=["POST"]),
        Route("/plugin/breaks", breaks),
        Route("/plugin/teapot", teapot),
        Route("/plugin/late", breaks_late),
        Route("/plugin/dialect", other_dialect, methods=["GET", "POST"]),
        Route("/v1/models", shadow),
    ]
    folder = tmp_path_factory.mktemp("extended")
    with ToyServer(
        folder, {"toy": {}}, plugin_routes=routes, server={"body_bytes_limit": 1024}
    ).running() as server:
        yield server


def test_routes_of_plugins_reach_the_models_and_are_bounded_too(extended) -> None:
    with httpx.Client(base_url=extended.url) as client:
        answer = client.post("/plugin/models", content=b"x" * 1024, headers={"x-request-id": "mine"})
        assert answer.text == "toy 1024 mine"
        assert client.post("/plugin/models", content=b"x" * 1025).json()["error"]["code"] == "body_too_large"


def test_a_route_that_breaks_answers_500_without_its_words(extended, caplog) -> None:
    answer = httpx.get(f"{extended.url}/plugin/breaks")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert [record.exc_info[1].args for record in caplog.records] == [("the secret of the request",)]
    assert httpx.get(f"{extended.url}/plugin/teapot").json()["error"]["message"] == "I am a teapot"


def test_a_route_may_write_errors_in_the_shape_of_another_dialect(extended) -> None:
    refused = httpx.get(f"{extended.url}/plugin/dialect")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json() == {"wrong": [429, "queue_full"]}
    assert httpx.post(f"{extended.url}/plugin/dialect").json() == {"wrong": [500, "internal_error"]}


def test_a_route_that_breaks_late_breaks_the_connection(extended, caplog) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{extended.url}/plugin/late")
    assert {record.exc_info[1].args for record in caplog.records} == {("too late",)}


def test_a_plugin_cannot_replace_a_route_of_the_core(extended) -> None:
    assert httpx.get(f"{extended.url}/v1/models").json()["object"] == "list"
