"""Shapes and ranges of bodies: what is taken, and that a refusal names the field."""

import json

import pytest
from pydantic import ValidationError

from darkbloom_core.errors import InvalidRequest
from darkbloom_core.server._bodies import ChatCompletionBody, CompletionBody, read_json

MESSAGES = [{"role": "user", "content": "hello"}]


def chat_body(**fields) -> ChatCompletionBody:
    return read_json(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), ChatCompletionBody)


def refused(**fields) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat_body(**fields)
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": "x" * 300}, "model"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"reasoning_effort": "<|end|>"}, "reasoning_effort"),
    ],
    ids=str,
)
def test_a_field_out_of_shape_or_range_is_named(fields, param) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "x" * 256},
        {"temperature": 2},
        {"top_p": 1},
        {"top_k": -1},
        {"min_p": 1},
        {"presence_penalty": 2, "frequency_penalty": -2},
        {"repetition_penalty": 2},
        {"max_tokens": 1, "max_completion_tokens": 1},
        {"n": 16},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"stop": ["a" * 1024] * 16},
        {"logprobs": True, "top_logprobs": 20},
        {"tools": [{"type": "function", "function": {"name": "f" * 128}}]},
        {"prompt_cache_key": "k" * 256},
    ],
    ids=str,
)
def test_a_field_at_its_limit_is_taken(fields) -> None:
    body = chat_body(**fields).model_dump(exclude_none=True)
    assert all(body[name] == value or name == "tools" for name, value in fields.items())


def test_null_is_the_same_as_absent() -> None:
    names = set(ChatCompletionBody.model_fields) - {"model", "messages"}
    assert chat_body(**dict.fromkeys(names)) == chat_body()


def test_unknown_fields_are_ignored() -> None:
    assert chat_body(user="me", metadata={"a": "b"}, whatever=[1]) == chat_body()
    assert chat_body(stream_options={}).stream_options is not None


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b'{"model": NaN}', b'"\\ud800"', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut", "not UTF-8", "NaN", "half a surrogate", "deep", "long number"],
)
def test_what_is_not_json_is_refused_shortly(data) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        read_json(data, ChatCompletionBody)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("data", [b"[]", b'"text"', b"null", b"5"])
def test_a_body_that_is_no_object_is_refused(data) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        read_json(data, ChatCompletionBody)


def test_numbers_beyond_all_bounds_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_json(b'{"model": "m", "prompt": "x", "temperature": 1e999}', CompletionBody)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [1] * 1000},
        {"messages": [{"role": "user", "content": [1] * 1000}]},
        {"messages": [{"role": "assistant", "tool_calls": [1] * 1000}]},
        {"tools": [1] * 1000},
        {"stop": [1] * 1000},
        {"modalities": [1] * 1000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_thousand_bad_items_do_not_make_a_thousand_errors(fields) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionBody.model_validate({"model": "m", "messages": MESSAGES, **fields})
    assert caught.value.error_count() <= 2


def test_a_refusal_does_not_repeat_the_value() -> None:
    assert "secret" not in refused(temperature="secret").message
    assert "secret" not in refused(messages=[{"role": "secret"}]).message


@pytest.mark.parametrize("prompt", [["a", "b"], [], [1, 2], [[1]], None, 5], ids=str)
def test_a_completion_takes_one_prompt(prompt) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_json(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionBody)
    assert caught.value.param in ("prompt", "prompt[0]")


def test_a_body_of_many_tiny_values_is_refused_before_it_is_read() -> None:
    """And text may have as many commas as everything together."""
    fields = {"model": "m", "messages": [{"role": "user", "content": ""}]}
    own = sum(json.dumps(fields).count(mark) for mark in ",{[")
    fields["messages"][0]["content"] = "," * (400_000 - own)
    assert len(read_json(json.dumps(fields).encode(), ChatCompletionBody).messages) == 1
    fields["messages"][0]["content"] += "["
    with pytest.raises(InvalidRequest, match="400001 commas, braces and brackets"):
        read_json(json.dumps(fields).encode(), ChatCompletionBody)
