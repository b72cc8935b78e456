"""OpenAI's routes over HTTP, on toy models: right statuses, right shapes, streamed and whole alike."""

import json

import httpx
import openai
import pytest

MESSAGES = [{"role": "user", "content": "HELLO"}]


@pytest.fixture(scope="module")
def http(toy_server):
    with httpx.Client(base_url=toy_server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(toy_server):
    with openai.OpenAI(base_url=f"{toy_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(http, model="toy/plain", **fields):
    return http.post(
        "/v1/chat/completions", json={"model": model, "messages": MESSAGES, "max_tokens": 20, **fields}
    )


def events_of(response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    return [block.removeprefix("data: ") for block in blocks]


def error_of(response, status, code, param=None) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


def test_models_are_listed_and_found_by_names_with_slashes(client) -> None:
    assert [model.id for model in client.models.list()] == [
        "toy/broken",
        "toy/plain",
        "toy/slow",
        "toy/small",
    ]
    model = client.models.retrieve("toy/plain")
    assert (model.id, model.object, model.owned_by) == ("toy/plain", "model", "toy")
    assert model.modalities == ["text"]


def test_an_unknown_model_is_404_everywhere(http, client) -> None:
    error_of(ask(http, "toy/other"), 404, "model_not_found", "model")
    error_of(ask(http, "toy/other", stream=True), 404, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("toy/other")


@pytest.mark.parametrize("seed", range(6))
def test_a_seeded_answer_is_the_same_streamed_and_whole(client, seed) -> None:
    asked = {"model": "toy/plain", "messages": MESSAGES, "max_tokens": 60, "seed": seed, "temperature": 1.2}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        folded = stream.current_completion_snapshot
    assert plain(folded.choices[0]) == plain(whole.choices[0])
    assert folded.usage == whole.usage
    assert whole.usage.completion_tokens == 60
    assert whole.choices[0].finish_reason == "length"


def plain(choice) -> dict:
    message = choice.message.to_dict()
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []
    ]
    return {
        "content": message.get("content"),
        "reasoning": message.get("reasoning_content"),
        "calls": calls,
        "finish": choice.finish_reason,
    }


def test_choices_of_one_request_differ_and_repeat_with_the_seed(client) -> None:
    asked = {"model": "toy/plain", "messages": MESSAGES, "max_tokens": 20, "n": 3, "seed": 5}
    first, again = client.chat.completions.create(**asked), client.chat.completions.create(**asked)
    answers = [plain(choice) for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert answers == [plain(choice) for choice in again.choices]
    assert answers[0] != answers[1] != answers[2]
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (11, 60)


def test_choices_stream_side_by_side(http) -> None:
    *chunks, done = events_of(ask(http, n=2, stream=True, max_tokens=8))
    assert done == "[DONE]"
    parts = [json.loads(chunk)["choices"][0] for chunk in chunks]
    for index in (0, 1):
        own = [part for part in parts if part["index"] == index]
        assert own[0]["delta"] == {"role": "assistant"}
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == ["length"]
        assert own[-1]["finish_reason"] == "length"


def test_logprobs_come_with_every_token(http) -> None:
    choice = ask(http, logprobs=True, top_logprobs=3, max_tokens=10).json()["choices"][0]
    assert len(choice["logprobs"]["content"]) == 10
    assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {3}


def test_a_stop_string_ends_the_answer_before_it(http) -> None:
    whole = http.post(
        "/v1/completions", json={"model": "toy/plain", "prompt": "HELLO", "max_tokens": 30, "temperature": 0}
    ).json()["choices"][0]
    stop = whole["text"][10:13]
    cut = http.post(
        "/v1/completions",
        json={"model": "toy/plain", "prompt": "HELLO", "max_tokens": 30, "temperature": 0, "stop": stop},
    ).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole["text"].split(stop)[0], "stop")


def test_a_completion_has_sixteen_tokens_unless_asked_for_more(client) -> None:
    answer = client.completions.create(model="toy/plain", prompt="HELLO")
    assert (answer.object, answer.usage.completion_tokens) == ("text_completion", 16)
    streamed = list(client.completions.create(model="toy/plain", prompt="HELLO", seed=3, stream=True))
    whole = client.completions.create(model="toy/plain", prompt="HELLO", seed=3)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


@pytest.mark.parametrize("fields", [{}, {"stop": "Q"}, {"n": 2}], ids=str)
def test_logprobs_of_a_completion_are_arrays_streamed_and_whole_alike(client, fields) -> None:
    asked = {"model": "toy/plain", "prompt": "HELLO", "max_tokens": 40, "seed": 3, "logprobs": 2, **fields}
    whole = client.completions.create(**asked)
    folded: dict[int, dict] = {}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            arrays = folded.setdefault(choice.index, {})
            for name, array in choice.logprobs or ():
                arrays.setdefault(name, []).extend(array)
    assert sum(len(arrays["tokens"]) for arrays in folded.values()) == whole.usage.completion_tokens
    for choice in whole.choices:
        found = choice.logprobs
        assert dict(found) == folded[choice.index]
        assert "".join(found.tokens).split(fields.get("stop", "none"))[0] == choice.text
        assert [len("".join(found.tokens[:place])) for place in range(len(found.tokens))] == found.text_offset
        for token, logprob, alternatives in zip(
            found.tokens, found.token_logprobs, found.top_logprobs, strict=True
        ):
            assert alternatives[token] == logprob < 0
            assert len(alternatives) <= 3
        assert max(map(len, found.top_logprobs)) == 3  # a chosen one that is not among the two likeliest


def test_a_completion_has_no_more_logprobs_than_were_asked_for(client) -> None:
    asked = {"model": "toy/plain", "prompt": "HELLO", "max_tokens": 5}
    assert client.completions.create(**asked).choices[0].logprobs is None
    chosen = client.completions.create(**asked, logprobs=0).choices[0].logprobs
    assert (len(chosen.token_logprobs), chosen.top_logprobs) == (5, None)
    for chunk in client.completions.create(**asked, logprobs=0, stream=True):
        assert chunk.choices[0].logprobs is None or chunk.choices[0].logprobs.top_logprobs is None
    for wrong in (6, -1, "x"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**asked, logprobs=wrong)
        assert caught.value.param == "logprobs"


def test_an_answer_to_nobodys_limit_ends_with_the_context(http) -> None:
    answer = ask(http, "toy/small", max_tokens=None).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 64


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 5])
def test_a_prompt_over_the_context_names_both_numbers(http, stream, max_tokens) -> None:
    messages = [{"role": "user", "content": "X" * 100}]
    answer = ask(http, "toy/small", messages=messages, stream=stream, max_tokens=max_tokens)
    message = error_of(answer, 400, "context_length_exceeded", "messages")
    assert "106" in message
    assert "64" in message


def test_a_fault_that_the_codec_finds_is_400(http) -> None:
    error_of(ask(http, reasoning_effort="impossible"), 400, "invalid_value", "reasoning_effort")


def test_a_token_outside_the_vocabulary_is_400(http) -> None:
    error_of(ask(http, logit_bias={"64": 1}), 400, "invalid_value", "logit_bias")


def test_an_empty_prompt_is_400(http) -> None:
    answer = http.post("/v1/completions", json={"model": "toy/plain", "prompt": ""})
    error_of(answer, 400, "invalid_value", "prompt")


def test_blank_content_works(http) -> None:
    for content in ("", "   ", [], [{"type": "text", "text": ""}]):
        assert ask(http, messages=[{"role": "user", "content": content}]).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "toy/plain"}', b"\xff"])
def test_a_bad_body_is_400_in_the_common_shape(http, body) -> None:
    answer = http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_failed_step_is_500_or_the_last_event(http, toy_server) -> None:
    always_33 = {"logit_bias": {"33": 100}, "temperature": 0}
    error_of(ask(http, "toy/broken", **always_33), 500, "generation_failed")
    *_, last = events_of(ask(http, "toy/broken", stream=True, **always_33))
    assert json.loads(last)["error"]["code"] == "generation_failed"
    error_of(ask(http, "toy/broken", n=3, **always_33), 500, "generation_failed")
    assert ask(http, "toy/broken", logit_bias={"33": -100}).status_code == 200
    toy_server.wait_until_idle(2)


def test_the_client_sees_an_error_in_the_middle_of_a_stream(client) -> None:
    with pytest.raises(openai.APIError, match="could not be parsed"):
        list(
            client.chat.completions.create(
                model="toy/broken", messages=MESSAGES, stream=True, logit_bias={"33": 100}, temperature=0
            )
        )


def test_nothing_is_reserved_after_any_refusal(http, toy_server) -> None:
    for fields in ({"temperature": -1}, {"model": "no"}, {"messages": []}, {"logit_bias": {"64": 1}}):
        assert ask(http, **fields).status_code in (400, 404)
    toy_server.wait_until_idle(2)
