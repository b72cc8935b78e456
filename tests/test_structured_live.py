"""Structured output through the real server, the demo checkpoints and the ``openai`` client: the JSON is right."""

import asyncio
import json
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from soak import one_at_first

MODELS = ["demo/gpt-oss", "demo/gemma4"]
ONE_AT_FIRST = one_at_first(MODELS)
ANN = "Give me JSON with the keys name and age: Ann is 31 years old."
WEATHER = "What is the weather in Paris?"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city name"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name, **function):
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Get the current weather in a city.",
            "parameters": CITY,
            **function,
        },
    }


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(model, question, **fields):
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 200, **fields}


def whole(client, model, question, **fields):
    return client.chat.completions.create(**asked(model, question, **fields)).choices[0]


def streamed(client, model, question, **fields):
    """What the client puts together from a stream."""
    with client.chat.completions.stream(**asked(model, question, **fields)) as stream:
        for _ in stream:
            pass
        return stream.current_completion_snapshot.choices[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_parsed_answer_is_the_object_that_was_meant_and_its_tokens_are_told(client, model) -> None:
    fields = asked(model, ANN, response_format=Person, logprobs=True, top_logprobs=1)
    choice = client.chat.completions.parse(**fields).choices[0]
    assert (choice.message.parsed, choice.finish_reason) == (Person(name="Ann", age=31), "stop")
    tokens = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert tokens.decode().endswith(choice.message.content)
    parsed = streamed(client, model, ANN, response_format=Person).message
    assert (parsed.content, parsed.parsed) == (choice.message.content, choice.message.parsed)


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_any_json_object_is_one_in_every_choice_and_a_stop_string_still_ends_it(client, model) -> None:
    fields = asked(model, ANN, response_format={"type": "json_object"}, n=2)
    for choice in client.chat.completions.create(**fields).choices:
        assert json.loads(choice.message.content) == {"name": "Ann", "age": 31}
    cut = whole(client, model, ANN, response_format={"type": "json_object"}, stop=["31"])
    assert (cut.message.content, cut.finish_reason) == ('{"name": "Ann", "age": ', "stop")


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_however_wild_the_model_an_answer_that_ends_fits_and_one_that_is_cut_says_so(client, model) -> None:
    class Mood(pydantic.BaseModel, extra="forbid"):
        mood: Literal["good", "bad"]
        score: Literal[1, 2, 3]

    schema = {"name": "mood", "strict": True, "schema": Mood.model_json_schema()}
    fields = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 60}
    fields |= {"temperature": 1.5, "seed": 1, "n": 4}
    choices = client.chat.completions.create(**asked(model, "Hello!", **fields)).choices
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    assert all(choice.finish_reason in ("stop", "length") for choice in choices)
    assert len({Mood.model_validate_json(choice.message.content).mood for choice in ended}) == 2


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_grammar_binds_the_answer_and_leaves_thoughts_free(client, model) -> None:
    for ask, grammar in (
        (streamed, {"syntax": "lark", "definition": 'start: "Paris" | "London"'}),
        (whole, {"syntax": "regex", "definition": "Par(is|ma)"}),
    ):
        fields = {"response_format": {"type": "grammar", "grammar": grammar}, "reasoning_effort": "low"}
        choice = ask(client, model, "What is the capital of France?", **fields)
        assert (choice.message.content, choice.finish_reason) == ("Paris", "stop")
        assert "capital" in choice.message.reasoning_content


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_a_tool_is_called_if_it_must_be_with_arguments_that_fit(client, model) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    for ask, strict, choice, name in (
        (streamed, False, "required", "get_weather"),
        (whole, True, named, "get_time"),
    ):
        tools = [tool("get_weather", strict=strict), tool("get_time", strict=strict)]
        found = ask(client, model, WEATHER, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        (call,) = found.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (name, {"city": "Paris"})
        assert found.finish_reason == "tool_calls"


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_strict_tools_leave_the_model_free_not_to_call(client, model) -> None:
    found = whole(client, model, "What is 12 + 30?", tools=[tool("get_weather", strict=True)])
    assert found.message.content == "12 + 30 = 42"


@pytest.mark.parametrize("model", ONE_AT_FIRST)
def test_constrained_requests_join_and_leave_a_plain_one_and_each_gets_what_it_gets_alone(
    live_server, client, model
) -> None:
    """The mask stays with its row."""
    person = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    requests = [
        asked(model, "Count from 1 to 31.", max_tokens=60),
        asked(model, ANN, response_format=person),
        asked(model, WEATHER, tools=[tool("get_weather")], tool_choice="required"),
    ]
    alone = [client.chat.completions.create(**request).choices[0] for request in requests]

    async def all_at_once():
        url = f"{live_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as asynchronous:
            return await asyncio.gather(
                *(asynchronous.chat.completions.create(**request) for request in requests)
            )

    together = [found.choices[0] for found in asyncio.run(all_at_once())]
    for one, other in zip(alone, together, strict=True):
        assert (one.message.content, one.finish_reason) == (other.message.content, other.finish_reason)
    assert Person.model_validate_json(together[1].message.content) == Person(name="Ann", age=31)
    assert together[2].message.tool_calls[0].function.arguments == '{"city": "Paris"}'


BAD = [
    ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {
        "type": "object", "properties": {"a": {"type": "array", "items": {"type": "objekt"}}}}}},
     "response_format.json_schema.schema.properties.a.items"),
    ({"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: x"}}, "response_format.grammar.definition"),
    ({"type": "grammar", "grammar": {"syntax": "regex", "definition": "a("}}, "response_format.grammar.definition"),
]  # fmt: skip


@pytest.mark.parametrize("model", ONE_AT_FIRST)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("response_format", "param"), BAD, ids=["schema", "lark", "regex"])
def test_what_cannot_be_compiled_is_400_and_says_where(
    live_server, model, stream, response_format, param
) -> None:
    body = asked(model, "Hello!", response_format=response_format, stream=stream)
    found = httpx.post(f"{live_server.url}/v1/chat/completions", json=body, timeout=30)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
    live_server.wait_until_idle(2)


HOSTILE = {
    "patterns at once": {"allOf": [{"pattern": f"^(.*[a-f].{{{n}}})$"} for n in range(20)]},
    "multiples at once": {"allOf": [{"multipleOf": n} for n in (97, 89, 83, 79)]},
    "many members": {"properties": {f"k{n}": {} for n in range(9999)}},
    "itself": {"$ref": "#"},
    "counts of counts": {"type": "string", "pattern": "^((a{1,300}){1,300}){1,300}b$"},
}


def test_no_schema_takes_the_servers_time(live_server) -> None:
    """Each is refused, or its answer ends, while the client waits; the next request is served."""
    for name, schema in HOSTILE.items():
        asks = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        body = asked("demo/gemma4", "Hello!", response_format=asks, max_tokens=20)
        found = httpx.post(f"{live_server.url}/v1/chat/completions", json=body, timeout=30)
        assert found.status_code == (200 if name == "counts of counts" else 400), name
    live_server.wait_until_idle(2)


def test_a_strict_tool_that_cannot_be_compiled_is_400_and_says_where(live_server) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "format": "zip"}}}
    for model in MODELS:
        body = asked(model, "Hello!", tools=[tool("ok"), tool("f", parameters=bad, strict=True)])
        found = httpx.post(f"{live_server.url}/v1/chat/completions", json=body, timeout=30)
        assert found.status_code == 400
        assert found.json()["error"]["param"] == "tools[1].function.parameters.properties.a"
