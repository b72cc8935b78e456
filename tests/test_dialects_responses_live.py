"""The real server, the demo checkpoints and the ``openai`` client's Responses API: the answers are right."""

import asyncio
import json

import httpx
import openai
import pytest
from soak import one_at_first

from darkbloom_core.contracts import RequestFinished, RequestRefused, RequestStarted

MODELS = ["demo/gpt-oss", "demo/gemma4"]
ONE_AT_FIRST = one_at_first(MODELS)

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city name"}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def client(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(model, question, **fields) -> dict:
    return {"model": model, "input": question, "temperature": 0, "max_output_tokens": 300, **fields}


def both(client, **fields):
    """The response whole, and the one at the end of a stream; ids and times aside they are equal."""
    whole = client.responses.create(**fields)
    streamed = streamed_response(client, **fields)
    assert plain(whole) == plain(streamed)
    return whole


def streamed_response(client, **fields):
    """What the client makes of a stream; the texts of its deltas are those of the response."""
    texts = []
    with client.responses.stream(**fields) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
        completed = event.type == "response.completed"
        response = stream.get_final_response() if completed else event.response
    assert response.output_text == "".join(texts)
    return response


def plain(response) -> dict:
    content = response.to_dict()
    output = [
        {**item, "id": None, "call_id": None, "parsed_arguments": None, "content": unparsed(item)}
        for item in content["output"]
    ]
    return {**content, "id": None, "created_at": None, "output": output}


def unparsed(item) -> list:
    return [{**part, "parsed": None} for part in item.get("content", [])]


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_right_streamed_and_whole(client, model) -> None:
    response = both(client, **asked(model, "What is 12 + 30?"))
    assert response.output_text == "12 + 30 = 42"
    assert (response.status, response.model, response.error) == ("completed", model, None)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 10


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_reasoning_is_an_item_of_its_own_and_counted(client, model) -> None:
    response = both(client, **asked(model, "What is 12 + 30?", reasoning={"effort": "low"}))
    thought, message = response.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert "42" in thought.content[0].text
    assert message.content[0].text == "12 + 30 = 42"
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_tool_is_called_with_the_right_city_and_its_result_is_used(client, model) -> None:
    response = both(client, **asked(model, "What is the weather in Paris?", tools=[WEATHER]))
    call = response.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Paris"},
    )
    output = '{"temperature": 18, "sky": "cloudy"}'
    result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    fields = asked(model, [result], tools=[WEATHER], previous_response_id=response.id)
    assert "18" in both(client, **fields).output_text
    question = {"role": "user", "content": "What is the weather in Paris?"}
    history = [question, *(item.to_dict() for item in response.output), result]
    assert "18" in client.responses.create(**asked(model, history, tools=[WEATHER])).output_text


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_tool_is_called_that_must_be(client, model) -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        fields = asked(model, "What is the weather in Paris?", tools=[WEATHER], tool_choice=choice)
        assert json.loads(both(client, **fields).output[-1].arguments) == {"city": "Paris"}


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_earlier_responses_are_remembered_read_and_deleted(client, model) -> None:
    first = client.responses.create(**asked(model, "My name is Nina.", instructions="Be brief."))
    second = both(client, **asked(model, "What is my name?", previous_response_id=first.id))
    assert second.output_text == "Your name is Nina."
    assert client.responses.retrieve(second.id).output_text == "Your name is Nina."
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    texts = [item.content[0].text for item in items if item.type == "message"]
    assert (texts[0], texts[-1]) == ("My name is Nina.", "What is my name?")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_token_limit_cuts_a_response_and_says_so(client, model) -> None:
    response = both(client, **{**asked(model, "Count from 3 to 9."), "max_output_tokens": 1})
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 1


def test_the_asynchronous_client_works_too(live_server) -> None:
    async def answer():
        url = f"{live_server.url}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
            client.responses.stream(**asked("demo/gemma4", "What is 12 + 30?")) as stream,
        ):
            return await stream.get_final_response()

    assert asyncio.run(answer()).output_text == "12 + 30 = 42"


BAD = [
    ({"model": "demo/other"}, 404, "model_not_found", "model"),
    ({"input": []}, 400, "invalid_value", "input"),
    ({"background": True}, 400, "invalid_value", "background"),
    ({"previous_response_id": "resp_none"}, 400, "invalid_value", "previous_response_id"),
    ({"input": "word " * 140_000}, 400, "context_length_exceeded", "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, 400,
     "invalid_value", "input[0].content[0].image_url"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("fields", "status", "code", "param"), BAD, ids=lambda value: None)
def test_bad_input_has_its_status_and_leaves_nothing(
    live_server, fields, status, code, param, stream
) -> None:
    live_server.wait_until_idle(2)
    live_server.sink.take()
    body = {**asked("demo/gemma4", "Hello!"), "stream": stream, **fields}
    answer = httpx.post(f"{live_server.url}/v1/responses", json=body, timeout=30)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    live_server.wait_until_idle(2)
    events = live_server.sink.take(RequestStarted, RequestFinished, RequestRefused)
    kind = "image" if param.endswith(("image_url", "image_url.url")) else None
    assert events == [RequestRefused(status=status, error_code=code, media_kind=kind)]
