"""What the dialects tell of prompt tokens that were not computed again."""

from __future__ import annotations

import httpx

PROMPT = "Please say this back to me, word for word, and nothing else: " + "tiger piano winter river " * 60


def post(live_server, route, **body) -> dict:
    answer = httpx.post(f"{live_server.url}{route}", json={"model": "demo/gpt-oss", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def test_a_messages_prompt_is_what_was_read_from_the_cache_and_what_was_not(live_server):
    message = {"role": "user", "content": "Messages. " + PROMPT}
    cold, warm = (
        post(live_server, "/v1/messages", messages=[message], max_tokens=2, temperature=0) for _ in range(2)
    )
    assert cold["cache_read_input_tokens"] == 0
    assert warm["cache_read_input_tokens"] >= cold["input_tokens"] - 1 - 256 > 0
    assert warm["input_tokens"] + warm["cache_read_input_tokens"] == cold["input_tokens"]
    assert warm["output_tokens"] == cold["output_tokens"]


def test_a_response_tells_its_cached_tokens_and_a_cache_key_keeps_them_apart(live_server):
    body = {"input": "Responses. " + PROMPT, "max_output_tokens": 2, "temperature": 0, "store": False}
    usages = [
        post(live_server, "/v1/responses", **body, **key) for key in ({}, {}, {"prompt_cache_key": "mine"})
    ]
    cached = [usage["input_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == cached[2] == 0
    assert cached[1] >= usages[0]["input_tokens"] - 1 - 256 > 0
    assert len({usage["input_tokens"] for usage in usages}) == 1
