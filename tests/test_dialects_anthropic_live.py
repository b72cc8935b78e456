"""The real server, the demo checkpoints and the ``anthropic`` client: the answers are right."""

import asyncio

import anthropic
import httpx
import pytest
from soak import one_at_first

from darkbloom_core.contracts import RequestFinished, RequestRefused, RequestStarted

MODELS = ["demo/gpt-oss", "demo/gemma4"]
ONE_AT_FIRST = one_at_first(MODELS)
CAPITAL = {"role": "user", "content": "What is the capital of France?"}

WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city name"}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def client(live_server):
    with anthropic.Anthropic(base_url=live_server.url, api_key="none", max_retries=0) as client:
        yield client


def asked(model, question, **fields) -> dict:
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    sampling = {"temperature": 0, "top_p": 1.0, "top_k": 0}
    return {"model": model, "messages": messages, "max_tokens": 300, "extra_body": sampling, **fields}


def both(client, **fields):
    """The message whole, and the one that the client puts together from a stream; ids aside they are equal."""
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert plain(whole) == plain(streamed)
    return whole


def plain(message) -> dict:
    content = message.to_dict()
    blocks = [{**block, "id": None} for block in content["content"]]
    return {**content, "id": None, "content": blocks}


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_right_streamed_and_whole(client, model) -> None:
    message = both(client, **asked(model, "What is 12 + 30?"))
    (block,) = message.content
    assert (block.type, block.text) == ("text", "12 + 30 = 42")
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, model)
    assert message.usage.input_tokens > 5
    assert message.usage.output_tokens > 5


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_thoughts_are_shown_only_to_who_asks_for_them(client, model) -> None:
    fields = asked(model, "What is 12 + 30?")
    off = both(client, **fields, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]
    on = both(client, **fields, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in on.content] == ["thinking", "text"]
    assert "42" in on.content[0].thinking
    assert on.content[1].text == "12 + 30 = 42"
    assert 0 < on.usage.output_tokens_details.thinking_tokens < on.usage.output_tokens


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_tool_is_called_with_the_right_city_and_its_result_is_used(client, model) -> None:
    question = {"role": "user", "content": "What is the weather in Paris?"}
    fields = asked(model, [question], tools=[WEATHER], tool_choice={"type": "auto"})
    message = both(client, **fields)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "text", "text": '{"temperature": 18, "sky": "cloudy"}'}
    block = {"type": "tool_result", "tool_use_id": call.id, "content": [result]}
    history = [question, message.to_param(), {"role": "user", "content": [block]}]
    answer = both(client, **asked(model, history, tools=[WEATHER]))
    assert "18" in answer.content[-1].text


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_tool_is_called_that_must_be(client, model) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        fields = asked(model, "What is the weather in Paris?", tools=[WEATHER], tool_choice=choice)
        assert both(client, **fields).content[-1].input == {"city": "Paris"}


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_no_tool_is_called_if_none_may_be(client, model) -> None:
    fields = asked(model, "What is the weather in Paris?", tools=[WEATHER], tool_choice={"type": "none"})
    assert both(client, **fields).stop_reason == "end_turn"


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_instructions_and_earlier_turns_reach_the_model(client, model) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "My name is Nina.", **cached}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Nice to meet you, Nina!"}]},
        {"role": "user", "content": "What is my name?"},
    ]
    answer = both(client, **asked(model, turns), metadata={"user_id": "me"})
    assert answer.content[0].text == "Your name is Nina."
    brief = "Answer in one sentence."
    for system in (brief, [{"type": "text", "text": brief, **cached}]):
        answer = both(client, **asked(model, [CAPITAL], system=system))
        assert answer.content[0].text == "The capital of France is Paris."


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_token_limit_cuts_an_answer_and_says_so(client, model) -> None:
    message = both(client, **{**asked(model, "Count from 3 to 9."), "max_tokens": 1})
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 1)


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_stop_sequence_ends_the_answer_and_is_named(client, model) -> None:
    message = both(client, **asked(model, "Count from 3 to 9.", stop_sequences=["nothing", ", 7"]))
    assert message.content[0].text == "3, 4, 5, 6"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ", 7")


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_counted_tokens_are_those_of_the_prompt(client, model) -> None:
    fields = {
        "model": model,
        "messages": [CAPITAL],
        "system": "Be brief.",
        "tools": [WEATHER],
    }
    counted = client.messages.count_tokens(**fields)
    answer = client.messages.create(**fields, max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens > 20


def test_a_stream_has_the_events_of_the_dialect_in_their_order(live_server) -> None:
    fields = asked("demo/gpt-oss", "What is 12 + 30?", thinking={"type": "adaptive"}, stream=True)
    fields |= fields.pop("extra_body")
    answer = httpx.post(f"{live_server.url}/v1/messages", json=fields, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    once = [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block, *block, "message_delta", "message_stop"]


BAD = [
    ({"model": "demo/other"}, 404, "not_found_error", "model_not_found"),
    ({"messages": []}, 400, "invalid_request_error", "invalid_value"),
    ({"max_tokens": None}, 400, "invalid_request_error", "invalid_value"),
    ({"messages": [{"role": "user", "content": "word " * 140_000}]}, 400, "invalid_request_error",
     "context_length_exceeded"),
    ({"max_tokens": 10_000_000}, 400, "invalid_request_error", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]}, 400,
     "invalid_request_error", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("fields", "status", "kind", "code"), BAD, ids=lambda value: None)
def test_bad_input_has_its_status_in_the_dialects_shape_and_leaves_nothing(
    live_server, fields, status, kind, code, stream
) -> None:
    live_server.wait_until_idle(2)
    live_server.sink.take()
    body = {**asked("demo/gemma4", "Hello!"), "stream": stream, **fields}
    answer = httpx.post(f"{live_server.url}/v1/messages", json=body, timeout=30)
    assert (answer.status_code, answer.json()["type"]) == (status, "error")
    assert answer.json()["error"]["type"] == kind
    live_server.wait_until_idle(2)
    events = live_server.sink.take(RequestStarted, RequestFinished, RequestRefused)
    assert events == [RequestRefused(status=status, error_code=code)]


@pytest.mark.parametrize(
    ("method", "path", "error"),
    [
        ("GET", "/v1/messages", (405, "invalid_request_error")),
        ("GET", "/v1/messages/count_tokens", (405, "invalid_request_error")),
        ("POST", "/v1/messages/batches", (404, "not_found_error")),
        ("POST", "/v1/messages", (400, "invalid_request_error")),
        ("POST", "/v1/messages/count_tokens", (400, "invalid_request_error")),
    ],
)
def test_other_paths_and_methods_fail_in_the_dialects_shape(live_server, method, path, error) -> None:
    answer = httpx.request(method, live_server.url + path)
    assert (answer.status_code, answer.json()["error"]["type"]) == error
    if answer.status_code == 405:
        assert answer.headers["allow"] == "POST"


def test_the_asynchronous_client_works_too(live_server) -> None:
    async def both_ways():
        async with anthropic.AsyncAnthropic(
            base_url=live_server.url, api_key="none", max_retries=0
        ) as client:
            fields = asked("demo/gemma4", "What is 12 + 30?")
            whole = await client.messages.create(**fields)
            async with client.messages.stream(**fields) as stream:
                return whole, await stream.get_final_message()

    whole, streamed = asyncio.run(both_ways())
    assert plain(whole) == plain(streamed)
    assert whole.content[0].text == "12 + 30 = 42"
