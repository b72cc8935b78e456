"""Events of Anthropic's API: a stream, put together by the real client, is the whole message, at every cut."""

import json
from itertools import groupby

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from darkbloom_dialects._anthropic_answer import DELTAS_PER_PING, MessageAnswer, error_body
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from darkbloom_core.contracts import ContentDelta, ReasoningDelta, ToolCallDelta
from darkbloom_core.engine import OutputDelta, OutputEnd, Timings, Usage
from darkbloom_core.errors import (
    BodyTooLarge,
    DarkbloomError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelNotFound,
    NeverFits,
    OriginNotAllowed,
    QueueFull,
    Unauthorized,
)
from darkbloom_core.server import error_answer

EVENT = TypeAdapter(RawMessageStreamEvent)


def events_of(output, *, shows_thinking=True):
    answer = MessageAnswer(model="toy/m", prompt_tokens=7, shows_thinking=shows_thinking)
    told = [*answer.opening(), *(each for event in output for each in answer.of(event))]
    return answer, json.loads(json.dumps(told))


def whole(output, **fields):
    answer, told = events_of(output, **fields)
    return answer.whole(told)


def ended(*deltas, reason="stop", **fields):
    return [OutputDelta(deltas), OutputEnd(reason, Usage(9, 4), Timings(), **fields)]


def by_the_client(told):
    snapshot, buffers = None, {}
    for event in told:
        if event["type"] not in ("ping", "message_stop"):
            parsed = EVENT.validate_python(event)
            snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict()


def without_ids(message):
    return {**message, "id": None, "content": [{**block, "id": None} for block in message["content"]]}


@settings(deadline=None)
@given(data=st.data(), shows=st.booleans())
def test_a_stream_folds_to_the_whole_message(scripted_outputs, data, shows) -> None:
    _, output = data.draw(scripted_outputs)
    answer, told = events_of(output, shows_thinking=shows)
    message = answer.whole(told)
    assert by_the_client(told) == message
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 7


@settings(deadline=None)
@given(data=st.data())
def test_nothing_that_the_model_wrote_is_lost_and_no_cut_changes_it(scripted_outputs, data) -> None:
    script, output = data.draw(scripted_outputs)
    blocks = whole(output)["content"]
    said = {kind: "".join(block.get(kind, "") for block in blocks) for kind in ("text", "thinking")}
    assert said["thinking"] == "".join(text for kind, text in script if kind == "reasoning")
    used = [block for block in blocks if block["type"] == "tool_use"]
    shown = ""
    calls = 0
    for position, (kind, text) in enumerate(script):
        cut = position == len(script) - 1 and output[-1].reason == "length"
        if kind == "content":
            shown += text
        elif kind == "call":
            name = f"tool{calls}"
            calls += 1
            if is_object(text):
                assert used.pop(0)["input"] == json.loads(text.strip(" \n\t") or "{}")
            elif cut and text.lstrip(" \n\t").startswith("{") and used:
                used.pop(0)
            else:
                shown += f"{name}({text})"
    assert said["text"] == shown
    assert used == []


def is_object(text):
    try:
        return isinstance(json.loads(text.strip(" \n\t") or "{}"), dict)
    except ValueError:
        return False


@settings(deadline=None)
@given(data=st.data(), shows=st.booleans())
def test_blocks_come_one_after_another_between_the_start_and_the_end(scripted_outputs, data, shows) -> None:
    _, output = data.draw(scripted_outputs)
    _, told = events_of(output, shows_thinking=shows)
    told = [event for event in told if event["type"] != "ping"]
    assert told[0]["type"] == "message_start"
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    blocks = [list(group) for _, group in groupby(told[1:-2], key=lambda event: event["index"])]
    assert [block[0]["index"] for block in blocks] == list(range(len(blocks)))
    assert blocks
    for first, *between, last in blocks:
        assert (first["type"], last["type"]) == ("content_block_start", "content_block_stop")
        assert {event["type"] for event in between} <= {"content_block_delta"}


def test_each_way_to_end_has_its_reason() -> None:
    call = ToolCallDelta(0, "f", "{}")
    for output, reason in (
        (ended(ContentDelta("a")), ("end_turn", None)),
        (ended(ContentDelta("a"), reason="length"), ("max_tokens", None)),
        (ended(ContentDelta("a"), stop_string="STOP"), ("stop_sequence", "STOP")),
        (ended(call, reason="tool_calls"), ("tool_use", None)),
        (ended(call, reason="length"), ("max_tokens", None)),
        (ended(ToolCallDelta(0, "f", "no object"), reason="tool_calls"), ("end_turn", None)),
    ):
        message = whole(output)
        assert (message["stop_reason"], message["stop_sequence"]) == reason


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    assert whole(ended())["content"] == [{"type": "text", "text": ""}]
    hidden = whole(ended(ReasoningDelta("hm")), shows_thinking=False)
    assert hidden["content"] == [{"type": "text", "text": ""}]


def test_a_call_that_was_cut_keeps_what_is_complete_of_it() -> None:
    (block,) = whole(ended(ToolCallDelta(0, "f", '{"a": 1, "b": "cu'), reason="length"))["content"]
    assert block["input"] == {"a": 1}


def test_pieces_of_a_call_that_was_told_already_are_shown() -> None:
    late = ended(ToolCallDelta(0, "f", "{}"), ContentDelta("a"), ToolCallDelta(0, None, "late"))
    assert [block.get("text") for block in whole(late)["content"]] == [None, "alate"]


@pytest.mark.parametrize("delta", [ReasoningDelta("x"), ToolCallDelta(0, None, " ")], ids=["thought", "call"])
def test_there_is_a_sign_of_life_while_nothing_is_told(delta) -> None:
    output = ended(ToolCallDelta(0, "f"), *[delta] * DELTAS_PER_PING)
    _, told = events_of(output, shows_thinking=False)
    assert [event["type"] for event in told].count("ping") == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (NeverFits("x"), "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (OriginNotAllowed("x"), "permission_error"),
        (ModelNotFound("x"), "not_found_error"),
        (BodyTooLarge("x"), "request_too_large"),
        (QueueFull("x"), "rate_limit_error"),
        (Draining("x"), "overloaded_error"),
        (DeadlineExceeded("x"), "timeout_error"),
        (DarkbloomError("x"), "api_error"),
        (ValueError("x"), "api_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_the_dialects_word_for_it(error, kind) -> None:
    assert error_body(error_answer(error))["error"]["type"] == kind
