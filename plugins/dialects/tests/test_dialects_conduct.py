"""How both dialects behave on a real server when something goes wrong, and what becomes of responses."""

import contextlib
import json
import threading

import httpx
import pytest
from darkbloom_dialects import server_routes
from darkbloom_dialects._anthropic_bodies import MessagesBody
from darkbloom_dialects._endpoint import encoded
from darkbloom_dialects._responses_bodies import ResponsesBody
from pydantic import ValidationError

from darkbloom_core.contracts import RequestFinished, RequestRefused
from darkbloom_core.errors import SettingsError
from darkbloom_core.settings import Settings

HELLO = [{"role": "user", "content": "hello"}]
ASK = {
    "/v1/messages": {"model": "toy/plain", "messages": HELLO, "max_tokens": 3},
    "/v1/responses": {"model": "toy/plain", "input": "hello", "max_output_tokens": 3},
}
LIMIT = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}


@pytest.fixture
def client(dialect_server):
    dialect_server.sink.take()
    with httpx.Client(base_url=dialect_server.url, timeout=20) as client:
        yield client
    dialect_server.wait_until_idle(5)


def events(lines):
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def respond(client, **fields):
    answer = client.post("/v1/responses", json={**ASK["/v1/responses"], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ASK)
def test_a_body_that_is_too_large_is_413_in_the_dialects_shape(client, dialect_server, path) -> None:
    answer = client.post(path, content=b"x" * 100_001)
    kind = {"/v1/messages": "request_too_large", "/v1/responses": "invalid_request_error"}[path]
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, kind)
    assert dialect_server.sink.take(RequestRefused) == [
        RequestRefused(status=413, error_code="body_too_large")
    ]


def test_a_stream_is_plain_ascii() -> None:
    """Some clients split lines wherever Unicode sees a line end, as after U+2028."""
    data = encoded([{"type": "a", "text": "x\u2028y\u0085z\n😀"}, {"type": "b"}])
    assert data.isascii()
    lines = data.decode().splitlines()
    assert lines[0] == "event: a"
    assert events(lines) == [{"type": "a", "text": "x\u2028y\u0085z\n😀"}, {"type": "b"}]
    assert lines[2:4] == ["", "event: b"]


JUNK = {"messages": [1] * 1000, "system": [1] * 1000, "tools": [1] * 1000, "stop_sequences": [1] * 1000}
JUNK |= {
    "input": [1] * 1000,
    "include": [1] * 1000,
}


@pytest.mark.parametrize("name", JUNK)
@pytest.mark.parametrize("model", [MessagesBody, ResponsesBody])
def test_a_thousand_bad_items_do_not_make_a_thousand_errors(model, name) -> None:
    sound = {"model": "m", "messages": HELLO, "max_tokens": 3, "input": "hello"}
    if name in model.model_fields:
        with pytest.raises(ValidationError) as caught:
            model.model_validate({**sound, name: JUNK[name]})
        assert caught.value.error_count() <= 2


@pytest.mark.parametrize("path", ASK)
def test_a_fault_in_the_middle_is_the_last_event_of_a_stream_and_500_of_a_whole_answer(client, path) -> None:
    fields = {**ASK[path], "model": "toy/broken", LIMIT[path]: 2000}
    whole = client.post(path, json=fields)
    assert whole.status_code == 500
    told = events(client.post(path, json={**fields, "stream": True}).text.splitlines())
    if path == "/v1/messages":
        assert whole.json()["error"]["type"] == told[-1]["error"]["type"] == "api_error"
    else:
        assert whole.json()["error"]["code"] == "generation_failed"
        assert told[-1]["type"] == "response.failed"
        assert told[-1]["response"]["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ASK)
def test_a_client_that_hangs_up_frees_its_place(client, dialect_server, path, stream) -> None:
    fields = {**ASK[path], "model": "toy/slow", LIMIT[path]: 3000, "stream": stream}
    patience = httpx.Timeout(20, read=0.2)
    with (
        contextlib.suppress(httpx.ReadTimeout),
        client.stream("POST", path, json=fields, timeout=patience) as answer,
    ):
        next(answer.iter_lines())
    dialect_server.wait_until_idle(5)
    (finished,) = dialect_server.sink.take(RequestFinished)
    assert (finished.status, finished.streamed) == (499, stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ASK)
def test_a_prompt_over_the_context_names_both_numbers_before_a_stream_begins(client, path, stream) -> None:
    said = "messages" if path == "/v1/messages" else "input"
    fields = {**ASK[path], said: [{"role": "user", "content": "X" * 5000}], "stream": stream}
    answer = client.post(path, json=fields)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "5006" in message
    assert "4096" in message


@pytest.mark.parametrize("path", ASK)
def test_what_the_codec_refuses_names_the_dialects_field(client, path) -> None:
    effort = {"reasoning": {"effort": "impossible"}} if path == "/v1/responses" else {"messages": []}
    error = client.post(path, json={**ASK[path], **effort}).json()["error"]
    assert error["type"] == "invalid_request_error"
    if path == "/v1/responses":
        assert error["param"] == "reasoning.effort"
        long = client.post(path, json={**ASK[path], "input": "x" * 5000}).json()["error"]
        assert (long["code"], long["param"]) == ("context_length_exceeded", "input")


def test_a_response_is_kept_read_gone_on_from_and_deleted(client) -> None:
    first = respond(client, input="one", metadata={"a": "b"})
    assert client.get(f"/v1/responses/{first['id']}").json() == first
    second = respond(client, input="two", previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    items = client.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items if item.get("role") == "user"] == ["two", "one"]
    gone = client.delete(f"/v1/responses/{first['id']}")
    assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
    for answer in (
        client.get(f"/v1/responses/{first['id']}"),
        client.delete(f"/v1/responses/{first['id']}"),
        client.get(f"/v1/responses/{first['id']}/input_items"),
        client.post(f"/v1/responses/{first['id']}/cancel"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    refused = client.post("/v1/responses", json={**ASK["/v1/responses"], "previous_response_id": first["id"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    third = respond(client, previous_response_id=second["id"])  # holds the conversation itself
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_a_response_that_is_not_to_be_stored_is_not(client) -> None:
    for stream in (False, True):
        fields = {**ASK["/v1/responses"], "store": False, "stream": stream}
        answer = client.post("/v1/responses", json=fields)
        response = events(answer.text.splitlines())[-1]["response"] if stream else answer.json()
        assert client.get(f"/v1/responses/{response['id']}").status_code == 404


def test_a_page_of_input_items_is_what_was_asked_for(client) -> None:
    response = respond(client, input=[{"role": "user", "content": text} for text in "abcde"])
    path = f"/v1/responses/{response['id']}/input_items"

    def page(**query):
        body = client.get(path, params=query).json()
        return "".join(item["content"][0]["text"] for item in body["data"]), body["has_more"], body["last_id"]

    assert page()[:2] == ("edcba", False)
    texts, more, last = page(order="asc", limit=2)
    assert (texts, more) == ("ab", True)
    assert page(order="asc", limit=3, after=last)[:2] == ("cde", False)
    for query in ({"limit": 0}, {"limit": "x"}, {"limit": 101}, {"order": "up"}, {"after": "none"}):
        answer = client.get(path, params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))
    assert client.get(f"/v1/responses/{response['id']}", params={"stream": "true"}).status_code == 400


def test_a_running_response_is_cancelled_by_its_id(client, dialect_server) -> None:
    fields = {**ASK["/v1/responses"], "model": "toy/slow", "max_output_tokens": 3000, "stream": True}
    told, begun = [], threading.Event()

    def read():
        with httpx.stream("POST", f"{dialect_server.url}/v1/responses", json=fields, timeout=20) as answer:
            for line in answer.iter_lines():
                told.extend(events([line]))
                if told and told[-1]["type"].endswith(".delta"):
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(10)
    path = f"/v1/responses/{told[0]['response']['id']}"
    assert client.get(path).json()["status"] == "in_progress"
    assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
    thread.join(10)
    assert (told[-1]["type"], told[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
    kept = client.get(path).json()
    assert (kept["status"], kept["output"]) == ("cancelled", told[-1]["response"]["output"])
    again = client.post(f"{path}/cancel")
    assert (again.status_code, "cancelled" in again.json()["error"]["message"]) == (400, True)
    following = client.post(
        "/v1/responses", json={**ASK["/v1/responses"], "previous_response_id": kept["id"]}
    )
    assert following.status_code == 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stored_response": 1},
            "unknown option options.dialects.stored_response: did you mean stored_responses",
        ),
        ({"stored_bytes": -1}, "options.dialects.stored_bytes must be a whole number"),
        ({"stored_bytes": True}, "options.dialects.stored_bytes must be a whole number"),
        ({"stored_bytes": "1"}, "options.dialects.stored_bytes must be a whole number"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message) -> None:
    with pytest.raises(SettingsError, match=message):
        server_routes(Settings(options={"dialects": options}))


TOOL = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
FULL = {
    "/v1/chat/completions": {
        "model": "toy/plain",
        "max_tokens": 1,
        "messages": [
            {"role": "system", "content": "s", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
            {"role": "assistant", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stop": ["x"],
        "logit_bias": {"1": 0},
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "prompt_cache_key": "k",
    },
    "/v1/messages": {
        "model": "toy/plain",
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
        ],
        "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "tool", "name": "f"},
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
    },
    "/v1/responses": {
        "model": "toy/plain",
        "max_output_tokens": 1,
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "r"},
        ],
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": {"type": "function", "name": "f"},
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "previous_response_id": "r",
    },
}  # fmt: skip


def changed(value, new):
    """``value`` with one of its texts or keys replaced by ``new``, or ``new`` in place of an object or a list."""
    if isinstance(value, str):
        yield new
    elif isinstance(value, dict):
        yield new
        yield {**value, new: 1}
        for key, held in value.items():
            yield from ({**value, key: other} for other in changed(held, new))
            yield {(new if each == key else each): one for each, one in value.items()}
    elif isinstance(value, list):
        yield new
        for index, held in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in changed(held, new))
    else:
        yield new


@pytest.mark.parametrize("path", FULL)
def test_no_error_repeats_what_was_sent(client, path) -> None:
    """But for the name of a model that is not there, which is told up to 256 characters."""
    secret, statuses = "payloadX7", set()
    for body in changed(FULL[path], secret):
        answer = client.post(path, json=body)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code == 200 or (isinstance(body, dict) and body.get("model") == secret):
            continue
        assert secret not in answer.text, (body, answer.text)
        assert len(answer.content) < 1000, (body, answer.text)
    assert 400 in statuses
