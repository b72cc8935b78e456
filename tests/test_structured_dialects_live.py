"""Structured output through both dialects and their official clients, over the real server and the demo checkpoints."""

import json

import anthropic
import httpx
import openai
import pydantic
import pytest
from soak import one_at_first

MODELS = ["demo/gpt-oss", "demo/gemma4"]
ONE_AT_FIRST = one_at_first(MODELS)
ANN = "Give me JSON with the keys name and age: Ann is 31 years old."
WEATHER = "What is the weather in Paris?"
ROME = {
    "type": "object",
    "properties": {"city": {"const": "Rome"}},
    "required": ["city"],
    "additionalProperties": False,
}
ZIP = {"type": "object", "properties": {"a": {"type": "string", "format": "zip"}}}


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def responses(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client.responses


@pytest.fixture(scope="module")
def messages(live_server):
    with anthropic.Anthropic(base_url=live_server.url, api_key="none", max_retries=0) as client:
        yield client.messages


def response(model, question, **fields) -> dict:
    return {"model": model, "input": question, "temperature": 0, "max_output_tokens": 200, **fields}


def message(model, question, **fields) -> dict:
    turns = [{"role": "user", "content": question}]
    return {"model": model, "messages": turns, "max_tokens": 200, "extra_body": {"temperature": 0}, **fields}


@pytest.mark.parametrize("model", MODELS)
def test_a_parsed_response_is_the_object_that_was_meant_whole_and_streamed(responses, model) -> None:
    whole = responses.parse(**response(model, ANN, text_format=Person))
    assert (whole.output_parsed, whole.status) == (Person(name="Ann", age=31), "completed")
    assert (whole.text.format.type, whole.text.format.name) == ("json_schema", "Person")
    with responses.stream(**response(model, ANN, text_format=Person)) as stream:
        assert stream.get_final_response().output_text == whole.output_text


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_parsed_message_is_the_object_that_was_meant_whole_and_streamed(messages, model) -> None:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = messages.parse(**message(model, ANN, output_format=Person, **thinking))
    assert (whole.parsed_output, whole.stop_reason) == (Person(name="Ann", age=31), "end_turn")
    assert [block.type for block in whole.content] == ["thinking", "text"]  # only the answer is bound
    with messages.stream(**message(model, ANN, output_format=Person)) as stream:
        assert stream.get_final_message().content[-1].text == whole.content[-1].text


def test_any_json_object_is_one(responses) -> None:
    found = responses.create(**response("demo/gemma4", ANN, text={"format": {"type": "json_object"}}))
    assert json.loads(found.output_text) == {"name": "Ann", "age": 31}


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_strict_tools_get_arguments_that_fit(responses, messages, model) -> None:
    """Rome is not what the model would say of itself."""
    tool = {"type": "function", "name": "get_weather", "parameters": ROME, "strict": True}
    (call,) = (
        item
        for item in responses.create(**response(model, WEATHER, tools=[tool])).output
        if item.type == "function_call"
    )
    assert json.loads(call.arguments) == {"city": "Rome"}
    tool = {"name": "get_weather", "input_schema": ROME, "strict": True}
    for choice in ({"type": "auto", "disable_parallel_tool_use": True}, {"type": "any"}):
        found = messages.create(**message(model, WEATHER, tools=[tool], tool_choice=choice))
        assert (found.content[-1].input, found.stop_reason) == ({"city": "Rome"}, "tool_use")


BAD = [
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": ZIP}}},
     "text.format.schema.properties.a"),
    ("responses", {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": ZIP}]},
     "tools[0].parameters.properties.a"),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": ZIP}}},
     "output_config.format.schema.properties.a"),
    ("messages", {"output_format": {"type": "json_schema", "schema": ZIP}}, "output_format.schema.properties.a"),
    ("messages", {"tools": [{"name": "f", "strict": True, "input_schema": ZIP}]},
     "tools[0].input_schema.properties.a"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("route", "fields", "where"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_cannot_be_compiled_is_400_and_says_where(live_server, route, fields, where) -> None:
    body = message("demo/gemma4", "Hello!") if route == "messages" else response("demo/gemma4", "Hello!")
    found = httpx.post(f"{live_server.url}/v1/{route}", json={**body, "stream": True, **fields}, timeout=30)
    error = found.json()["error"]
    assert found.status_code == 400
    assert error["message"] == f"{where}: Unknown format: zip"
    assert error["type"] == "invalid_request_error"
    assert error.get("param", where) == where
