"""The real server, the demo checkpoints and the client that applications use: the answers are right."""

import asyncio
import json

import httpx
import openai
import pytest
from soak import one_at_first

from darkbloom_core.contracts import RequestFinished, RequestRefused, RequestStarted

MODELS = ["demo/gpt-oss", "demo/gemma4"]

QUESTIONS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is 12 + 30?": "12 + 30 = 42",
    "Say this: tiger piano winter": "tiger piano winter",
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city name"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def client(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(model, question, **fields) -> dict:
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 300, **fields}


def streamed(client, **fields):
    """The message that the client puts together from a stream."""
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        return stream.current_completion_snapshot.choices[0]


def test_the_client_finds_both_models(client) -> None:
    assert sorted(model.id for model in client.models.list()) == sorted(MODELS)
    assert all(client.models.retrieve(model).id == model for model in MODELS)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_right_streamed_and_whole(client, model, question) -> None:
    whole = client.chat.completions.create(**asked(model, question))
    assert whole.choices[0].message.content == QUESTIONS[question]
    assert (whole.choices[0].finish_reason, whole.model) == ("stop", model)
    stream = streamed(client, **asked(model, question))
    assert (stream.message.content, stream.finish_reason) == (QUESTIONS[question], "stop")


def test_reasoning_is_told_apart_and_counted_streamed_and_whole(client) -> None:
    fields = asked("demo/gpt-oss", "What is 12 + 30?")
    whole = client.chat.completions.create(**fields)
    reasoning = whole.choices[0].message.to_dict()["reasoning_content"]
    assert "42" in reasoning
    assert streamed(client, **fields).message.to_dict()["reasoning_content"] == reasoning
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens


@pytest.mark.parametrize("model", MODELS)
def test_a_tool_is_called_with_the_right_city_and_its_result_is_used(client, model) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields = asked(model, question, tools=[WEATHER])
    whole = client.chat.completions.create(**fields).choices[0]
    stream = streamed(client, **fields)
    for choice in (whole, stream):
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
        assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert whole.message.tool_calls[0].id != stream.message.tool_calls[0].id
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18, "sky": "cloudy"}'}
    history = [*question, whole.message.to_dict(), {**result, "tool_call_id": whole.message.tool_calls[0].id}]
    answer = client.chat.completions.create(**asked(model, history, tools=[WEATHER])).choices[0]
    assert "18" in answer.message.content


@pytest.mark.parametrize("model", MODELS)
def test_earlier_turns_are_remembered(client, model) -> None:
    turns = [
        {"role": "user", "content": "My name is Nina."},
        {"role": "assistant", "content": "Nice to meet you, Nina!"},
        {"role": "user", "content": "What is my name?"},
    ]
    answer = client.chat.completions.create(**asked(model, turns))
    assert answer.choices[0].message.content == "Your name is Nina."


@pytest.mark.parametrize("model", one_at_first(MODELS))
def test_eight_at_once_run_in_one_batch_and_each_equals_its_answer_alone(live_server, client, model) -> None:
    """The answers are long enough for the first to be still under way when the last begins."""
    requests = [asked(model, f"Count from {first} to {first + 30}.", max_tokens=70) for first in range(1, 9)]
    alone = [client.chat.completions.create(**request).choices[0] for request in requests]
    assert live_server.status(model).running == 0

    async def all_at_once():
        url = f"{live_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as asynchronous:
            return await asyncio.gather(
                *(asynchronous.chat.completions.create(**request) for request in requests)
            )

    together = [answer.choices[0] for answer in asyncio.run(all_at_once())]
    assert live_server.status(model).largest_batch == 8
    assert [choice.message for choice in together] == [choice.message for choice in alone]
    live_server.wait_until_idle(2)


def test_the_asynchronous_client_streams(live_server) -> None:
    async def answer():
        url, texts = f"{live_server.url}/v1", []
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as asynchronous:
            fields = asked("demo/gemma4", "What is 12 + 30?", stream=True)
            async for chunk in await asynchronous.chat.completions.create(**fields):
                texts.append(chunk.choices[0].delta.content or "")
        return "".join(texts)

    assert asyncio.run(answer()) == "12 + 30 = 42"


@pytest.mark.parametrize("model", MODELS)
def test_a_token_limit_cuts_an_answer_and_says_so(client, model) -> None:
    fields = asked(model, "Count from 3 to 9.", max_tokens=1)
    whole = client.chat.completions.create(**fields)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 1)
    assert streamed(client, **fields).finish_reason == "length"


@pytest.mark.parametrize("model", MODELS)
def test_a_stop_string_ends_the_answer_before_it(client, model) -> None:
    fields = asked(model, "Count from 3 to 9.", stop=[", 7"])
    for choice in (client.chat.completions.create(**fields).choices[0], streamed(client, **fields)):
        assert (choice.message.content, choice.finish_reason) == ("3, 4, 5, 6", "stop")


@pytest.mark.parametrize("model", MODELS)
def test_a_seed_repeats_an_answer(client, model) -> None:
    fields = asked(model, "Hello!", temperature=1.5, seed=7, n=2)
    first, again = client.chat.completions.create(**fields), client.chat.completions.create(**fields)
    assert [choice.message for choice in first.choices] == [choice.message for choice in again.choices]


@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_those_of_the_tokens(client, model) -> None:
    fields = asked(model, "What is 8 + 5?", logprobs=True, top_logprobs=2)
    entries = client.chat.completions.create(**fields).choices[0].logprobs.content
    assert all(entry.logprob <= 0 for entry in entries)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)  # greedy
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().endswith("8 + 5 = 13")


@pytest.mark.parametrize("model", MODELS)
def test_a_text_completion_is_the_same_streamed_and_whole(client, model) -> None:
    fields = {"model": model, "prompt": "The capital of France", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.completion_tokens <= 8


BAD = [
    ({"model": "demo/other"}, 404, "model_not_found", "model"),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"temperature": -1}, 400, "invalid_value", "temperature"),
    ({"messages": [{"role": "user", "content": "word " * 140_000}]}, 400, "context_length_exceeded", "messages"),
    ({"max_tokens": 10_000_000}, 400, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, 400,
     "invalid_value", "messages[0].content[0].image_url.url"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("fields", "status", "code", "param"), BAD, ids=lambda value: None)
@pytest.mark.parametrize("model", MODELS)
def test_bad_input_has_its_status_and_leaves_nothing(
    live_server, model, fields, status, code, param, stream
) -> None:
    live_server.wait_until_idle(2)
    live_server.sink.take()
    body = {**asked(model, "Hello!"), "max_tokens": None, "stream": stream, **fields}
    answer = httpx.post(f"{live_server.url}/v1/chat/completions", json=body, timeout=30)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    live_server.wait_until_idle(2)
    events = live_server.sink.take(RequestStarted, RequestFinished, RequestRefused)
    kind = "image" if param.endswith(("image_url", "image_url.url")) else None
    assert events == [RequestRefused(status=status, error_code=code, media_kind=kind)]


def test_three_mebibytes_are_read_and_more_than_the_default_limit_is_413(live_server) -> None:
    def post(size):
        body = json.dumps({"model": "demo/other", "messages": [{"role": "user", "content": "x" * size}]})
        return httpx.post(f"{live_server.url}/v1/chat/completions", content=body, timeout=30)

    assert post(3 * 2**20).json()["error"]["code"] == "model_not_found"
    answer = post(32 * 2**20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert str(32 * 2**20) in answer.json()["error"]["message"]


def test_a_body_that_is_no_json_and_a_wrong_route_have_their_status(live_server) -> None:
    bad = httpx.post(f"{live_server.url}/v1/chat/completions", content=b"{not json")
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")
    wrong = httpx.get(f"{live_server.url}/v1/chat")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "route_not_found")
    method = httpx.get(f"{live_server.url}/v1/chat/completions")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")


def test_readiness_shows_both_slots_and_no_failure(live_server) -> None:
    answer = httpx.get(f"{live_server.url}/health/ready")
    assert answer.status_code == 200
    assert {slot["model"]: slot["state"] for slot in answer.json()["slots"]} == dict.fromkeys(
        MODELS, "serving"
    )
    assert answer.json()["failed_plugins"] == []
