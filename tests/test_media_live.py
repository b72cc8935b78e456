"""The real server, the demo that sees, and the clients that applications use: pictures and videos in every dialect."""

import anthropic
import httpx
import openai
import pytest
from media_files import data_uri, picture_file
from seeing import (
    MODEL,
    Question,
    anthropic_image,
    ask_anthropic,
    ask_openai,
    clip,
    drawing,
    openai_content,
    png,
)

from darkbloom_core.contracts import RequestRefused

BLIND = "demo/gpt-oss"
COLOUR = "What colour is the shape?"


def circle(colour):
    return drawing("white", ("circle", colour, 0.5, 0.5, 0.3), side=96)


RED, BLUE = png(circle("red")), png(circle("blue"))
PNG = picture_file(circle("red"))
CLIP = clip([drawing(colour, side=96) for colour in ("red", "blue")])


def shown(uri):
    return Question("colour", COLOUR, "", (uri,))


@pytest.fixture(scope="module")
def openai_client(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(live_server):
    with anthropic.Anthropic(base_url=live_server.url, api_key="none", max_retries=0) as client:
        yield client


def ask_responses(client, items, **fields):
    return client.responses.create(model=MODEL, input=items, temperature=0, max_output_tokens=60, **fields)


def shown_item(uri):
    content = [
        {"type": "input_image", "image_url": uri, "detail": "auto"},
        {"type": "input_text", "text": COLOUR},
    ]
    return {"role": "user", "content": content}


def test_a_picture_steers_the_answer_the_same_in_every_dialect_streamed_and_again(
    live_server, openai_client, anthropic_client
):
    live_server.wait_until_idle(5)
    live_server.sink.take()
    before = live_server.status(MODEL)
    assert ask_openai(openai_client, shown(RED)) == "The circle is red."
    assert ask_openai(openai_client, shown(BLUE)) == "The circle is blue."
    messages = [{"role": "user", "content": openai_content(shown(RED))}]
    with openai_client.chat.completions.stream(
        model=MODEL, messages=messages, temperature=0, max_tokens=60
    ) as stream:
        for _ in stream:
            pass
        assert stream.current_completion_snapshot.choices[0].message.content == "The circle is red."
    assert ask_anthropic(anthropic_client, shown(RED)) == "The circle is red."
    after = live_server.status(MODEL)
    assert after.decode_steps > before.decode_steps
    assert after.prefill_tokens > before.prefill_tokens
    assert not live_server.sink.take(RequestRefused)


def test_a_response_about_a_picture_can_be_gone_on_from(openai_client):
    first = ask_responses(openai_client, [shown_item(BLUE)])
    assert first.output_text == "The circle is blue."
    second = ask_responses(openai_client, "Which shape is it?", previous_response_id=first.id)
    assert second.output_text == "It is a circle."
    (item,) = [item for item in openai_client.responses.input_items.list(first.id) if item.role == "user"]
    assert item.content[0].image_url == BLUE


def test_the_result_of_a_tool_may_be_a_picture_in_every_dialect(openai_client, anthropic_client):
    """Asked about afterwards; Anthropic's is blue, the others are red."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    text, tool = "Look at this.", {"name": "look", "description": "Look.", "parameters": parameters}
    call = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": '{"city": "Paris"}'}}
    chat = [
        {"role": "user", "content": text},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": openai_content(shown(RED))[:1]},
        {"role": "user", "content": COLOUR},
    ]
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=chat,
        tools=[{"type": "function", "function": tool}],
        temperature=0,
        max_tokens=30,
    )
    assert answer.choices[0].message.content == "The circle is red."
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [anthropic_image(BLUE)]}
    asked = {
        "model": MODEL,
        "tools": [{"name": "look", "description": "Look.", "input_schema": parameters}],
        "messages": [
            {"role": "user", "content": text},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, {"type": "text", "text": COLOUR}]},
        ],
    }
    message = anthropic_client.messages.create(**asked, max_tokens=30, extra_body={"temperature": 0})
    assert message.content[0].text == "The circle is blue."
    counted = anthropic_client.messages.count_tokens(**asked).input_tokens
    assert counted == message.usage.input_tokens == answer.usage.prompt_tokens
    items = [
        {"role": "user", "content": text},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c1", "output": shown_item(RED)["content"][:1]},
        {"role": "user", "content": COLOUR},
    ]
    response = ask_responses(openai_client, items, tools=[{"type": "function", **tool}])
    assert response.output_text == "The circle is red."


def test_videos_are_seen_and_mixed_media_keep_their_order(openai_client):
    video = Question("video", "Which colours appear, in order?", "", (CLIP,))
    assert ask_openai(openai_client, video) == "red, blue"
    shown_parts = (("video", clip([drawing("green", side=96)])), ("colour", png(drawing("blue", side=96))))
    parts = [openai_content(Question(kind, "", "", (uri,)))[0] for kind, uri in shown_parts]
    text = {"type": "text", "text": "What colour is the second image?"}
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": [*parts, text]}], temperature=0, max_tokens=30
    )
    assert answer.choices[0].message.content == "The second image is blue."


# --- what is refused ---------------------------------------------------------------------

ELSEWHERE = [
    "http://127.0.0.1:1/x", "https://example.org/x.png", "file:///etc/passwd", "/etc/passwd",
]  # fmt: skip
UNREADABLE = {
    "base64": "data:image/png;base64,QU%JD",
    "percent-encoding": "data:image/png,%zz",
    "no comma": "data:image/png;base64",
    "does not say that it is an image": "data:text/plain;base64,QUJD",
    "is empty": "data:image/png;base64,",
    "not a PNG, JPEG, WebP": data_uri(b"hello", "image/png"),
    "is damaged": data_uri(PNG[: len(PNG) // 2], "image/png"),
    "cannot be read": data_uri(PNG[:20] + b"\x9a\x03\xc1" * 99, "image/png"),
}


def bodies(uri):
    """Requests of every dialect that show ``uri``, and the field that is at fault."""
    source = {"type": "url", "url": uri}
    where = "messages[0].content[0].source.url"
    if uri.startswith("data:image/png;base64,"):
        source, where = anthropic_image(uri)["source"], "messages[0].content[0].source"
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    chat = [{"role": "user", "content": openai_content(shown(uri))}]
    yield "chat/completions", {"messages": chat}, "messages[0].content[0].image_url.url"
    yield "responses", {"input": [shown_item(uri)]}, "input[0].content[0].image_url"
    yield "messages", {"messages": messages, "max_tokens": 5}, where
    yield "messages/count_tokens", {"messages": messages}, where


def refusal(server, route, body, model=MODEL):
    """Without ``verify`` the client reads no certificates, which takes longer than a refusal."""
    answer = httpx.post(f"{server.url}/v1/{route}", json={"model": model, **body}, timeout=30, verify=False)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error.get("param")


@pytest.mark.parametrize("uri", ELSEWHERE)
def test_nothing_is_fetched_or_read_from_elsewhere_and_the_refusal_says_so(live_server, uri):
    for route, body, where in bodies(uri):
        message, param = refusal(live_server, route, body)
        assert message == f"{where}: an image must come as a data: URI; nothing is fetched from elsewhere"
        assert param == (None if route.startswith("messages") else where)
    video = {"messages": [{"role": "user", "content": openai_content(Question("video", "?", "", (uri,)))}]}
    assert "a video must come as a data: URI" in refusal(live_server, "chat/completions", video)[0]


@pytest.mark.parametrize("reason", UNREADABLE)
def test_what_is_no_picture_is_refused_with_its_field_and_the_reason(live_server, reason):
    for route, body, where in bodies(UNREADABLE[reason]):
        if reason == "no comma" and route.startswith("messages"):
            continue  # its source is in parts
        message, _ = refusal(live_server, route, body)
        assert message.startswith(f"{where}: ")
        assert reason in message


def test_what_is_no_video_is_refused(live_server):
    for uri in (
        RED,
        data_uri(PNG, "video/mp4"),
        data_uri(b"\0\0\0\x18ftypmp42" + b"\x7f" * 999, "video/mp4"),
        CLIP[:900],
    ):
        body = {"messages": [{"role": "user", "content": openai_content(Question("video", "?", "", (uri,)))}]}
        assert refusal(live_server, "chat/completions", body)[1] == "messages[0].content[0].video_url.url"


def test_a_model_that_does_not_see_refuses_pictures_by_their_kind_in_every_dialect(live_server):
    for route, body, where in bodies(RED):
        message, _ = refusal(live_server, route, body, model=BLIND)
        assert message == f"{where}: this model does not accept images"
    body = {"messages": [{"role": "user", "content": openai_content(Question("video", "?", "", (CLIP,)))}]}
    assert refusal(live_server, "chat/completions", body, model=BLIND)[0].endswith("does not accept videos")


def test_only_users_and_tools_may_show_pictures(live_server):
    cases = [
        ("chat/completions", "messages", {"role": "system", "content": openai_content(shown(RED))}),
        ("responses", "input", {**shown_item(RED), "role": "developer"}),
    ]
    for route, field, turn in cases:
        message, param = refusal(live_server, route, {field: [turn, {"role": "user", "content": "Hi"}]})
        assert (param, "cannot hold" in message) == (f"{field}[0].content[0]", True)
    body = {
        "system": [anthropic_image(RED)],
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
    }
    assert refusal(live_server, "messages", body)[0].startswith("system[0]: a message of the role system")
