"""Hundreds of mutated bodies to a real server: no fault of the server's, no hang, nothing left behind."""

import copy
import json
import random
from collections import Counter

import httpx
import pytest

TEXT = {"type": "text", "text": "hello"}
MESSAGES = {
    "model": "toy/plain",
    "max_tokens": 3,
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [TEXT, {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [TEXT]}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["stop"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "stream": False,
    "metadata": {"user_id": "me"},
}

PART = {"type": "input_text", "text": "hello"}
RESPONSES = {
    "model": "toy/plain",
    "max_output_tokens": 3,
    "instructions": "hello",
    "input": [
        {"type": "message", "role": "user", "content": [PART]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [PART]},
        {"role": "user", "content": "hello"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "temperature": 0.5,
    "top_p": 0.9,
    "store": True,
    "stream": False,
}

BODIES = {
    "/v1/messages": (MESSAGES, "max_tokens"),
    "/v1/messages/count_tokens": (MESSAGES, "max_tokens"),
    "/v1/responses": (RESPONSES, "max_output_tokens"),
}

VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**70,
    1.5,
    1e308,
    "",
    "x",
    "auto",
    "é\u2028",
    [],
    [None],
    {},
    {"type": "text"},
]
VALUES += [
    {"type": "image"},
    [["x"]],
    "x" * 2000,
    {"a": {"b": [1]}},
    "toy/other",
    "tool_use",
    "user",
    "assistant",
]


def places(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from places(value[index], (*path, index))


def mutated(body, dice):
    """``body`` with up to three things taken out, doubled or replaced."""
    body = copy.deepcopy(body)
    for _ in range(dice.choice([1, 1, 2, 3])):
        path = dice.choice([path for path in places(body) if path])
        holder = body
        for step in path[:-1]:
            holder = holder[step]
        kind = dice.random()
        if kind < 0.3:
            del holder[path[-1]]
        elif kind < 0.4 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        else:
            holder[path[-1]] = copy.deepcopy(dice.choice(VALUES))
        if not body:
            break
    return body


@pytest.mark.parametrize("path", BODIES)
def test_no_body_makes_the_server_fail(dialect_server, path) -> None:
    dice = random.Random(path)
    sound, limit = BODIES[path]
    statuses = Counter()
    with httpx.Client(base_url=dialect_server.url, timeout=20) as client:
        for _ in range(120):
            body = mutated(sound, dice)
            if not isinstance(body.get(limit), int):
                body[limit] = dice.choice([1, 2, 3, "3"])
            if dice.random() < 0.3:
                body["stream"] = True
            answer = client.post(path, content=json.dumps(body))
            statuses[answer.status_code] += 1
            assert answer.status_code in (200, 400, 404), (answer.text, body)
            assert len(answer.content) < 10_000
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
    assert statuses[200] > 15, statuses
    assert statuses[400] > 15, statuses
    dialect_server.wait_until_idle(5)
