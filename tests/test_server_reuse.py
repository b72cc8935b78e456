"""Prefix reuse as clients see it: scopes, and the tokens that usage says were cached."""

from __future__ import annotations

import json
from itertools import count

import httpx
import pytest

from darkbloom_core.contracts import RequestFinished, RequestRefused

_numbers = count()


@pytest.fixture
def prompt() -> str:
    """600 characters that no other test has asked about."""
    return f"{next(_numbers)} " + "THE SAME BEGINNING " * 31


@pytest.fixture
def server(toy_server):
    toy_server.wait_until_idle(2)
    toy_server.sink.take()
    return toy_server


def post(server, prompt, headers=None, **fields) -> httpx.Response:
    body = {
        "model": "toy/plain",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 3,
        "temperature": 0,
        **fields,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=30)


def usage(answer: httpx.Response) -> dict:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def cached(answer: httpx.Response) -> int:
    return usage(answer).get("prompt_tokens_details", {}).get("cached_tokens", 0)


def test_cached_tokens_are_told_only_if_there_are_any_and_nothing_else_changes(server, prompt):
    cold, warm = usage(post(server, prompt)), usage(post(server, prompt))
    assert "prompt_tokens_details" not in cold
    assert warm.pop("prompt_tokens_details") == {"cached_tokens": 512}
    assert warm == cold
    server.wait_until_idle(2)
    assert [event.cached_tokens for event in server.sink.take(RequestFinished)] == [0, 512]


def test_a_stream_tells_the_same(server, prompt):
    post(server, prompt)
    answer = post(server, prompt, stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 512}


def test_text_completions_reuse_too(server, prompt):
    body = {"model": "toy/plain", "prompt": prompt, "max_tokens": 1}
    answers = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=30) for _ in range(2)]
    assert [cached(answer) for answer in answers] == [0, 512]


def test_choices_of_one_request_prefill_once_and_count_what_was_computed(server, prompt):
    engine = server.engine("toy/plain")
    before = engine.status().prefill_tokens
    assert cached(post(server, prompt, n=3)) == 0
    tokens = usage(post(server, prompt, n=3))["prompt_tokens"]
    computed = engine.status().prefill_tokens - before
    assert computed == tokens + 5 * (tokens - 512)


WHO = [
    {},
    {"headers": {"X-Darkbloom-Scope": "a"}},
    {"headers": {"X-Darkbloom-Scope": "b"}},
    {"prompt_cache_key": "a"},
    {"headers": {"X-Darkbloom-Scope": "a"}, "prompt_cache_key": "a"},
]


def test_only_the_same_scope_and_key_share(server, prompt):
    assert [cached(post(server, prompt, **who)) for who in WHO] == [0] * 5
    assert [cached(post(server, prompt, **who)) for who in WHO] == [512] * 5


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Darkbloom-Scope", "")],
        [("X-Darkbloom-Scope", "x" * 257)],
        [("X-Darkbloom-Scope", b"\xe9")],
        [("X-Darkbloom-Scope", "a"), ("x-darkbloom-scope", "b")],
    ],
    ids=["empty", "too long", "no ASCII", "twice"],
)
def test_a_scope_that_could_be_misread_is_refused(server, headers):
    answer = post(server, "HELLO", headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Darkbloom-Scope"
    server.wait_until_idle(2)
    assert [event.status for event in server.sink.take(RequestRefused, RequestFinished)] == [400]


@pytest.mark.parametrize("key", ["", "x" * 257, 5])
def test_a_bad_cache_key_is_refused(server, key):
    assert post(server, "HELLO", prompt_cache_key=key).json()["error"]["param"] == "prompt_cache_key"
