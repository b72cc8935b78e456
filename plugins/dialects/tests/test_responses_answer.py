"""Events of the Responses API: a stream, put together by the real client, is the whole response, at every cut."""

import json
from itertools import pairwise

import pytest
from darkbloom_dialects._responses_answer import ResponseAnswer
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from darkbloom_core.contracts import ContentDelta, ReasoningDelta, ToolCallDelta
from darkbloom_core.engine import OutputDelta, OutputEnd, Timings, Usage
from darkbloom_core.errors import GenerationFailed, RequestCancelled

EVENT = TypeAdapter(ResponseStreamEvent)
HEAD = {"created_at": 1, "model": "m", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}


def events_of(output):
    kept = []
    answer = ResponseAnswer("resp_1", HEAD, kept.append)
    told = [*answer.opening(), *(each for event in output for each in answer.of(event))]
    return answer, kept, json.loads(json.dumps(told))


def ended(*deltas, reason="stop"):
    return [OutputDelta(deltas), OutputEnd(reason, Usage(9, 4), Timings())]


def whole(output):
    answer, _, told = events_of(output)
    return answer.whole(told)


def drop_nulls(value):
    """A client's fold knows no difference between null and absent."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_stream_is_valid_for_the_client_and_ends_with_the_whole_response(scripted_outputs, data) -> None:
    _, output = data.draw(scripted_outputs)
    answer, kept, told = events_of(output)
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in told:
        state.handle_event(EVENT.validate_python(event))
    response = answer.whole(told)
    assert [json.loads(json.dumps(each)) for each in kept] == [response]
    assert drop_nulls(Response.model_validate(response).to_dict()) == drop_nulls(response)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))


@settings(deadline=None)
@given(data=st.data())
def test_what_the_deltas_say_is_what_the_items_hold_and_nothing_is_lost(scripted_outputs, data) -> None:
    script, output = data.draw(scripted_outputs)
    _, _, told = events_of(output)
    deltas: dict[str, str] = {}
    for event in told:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    items = told[-1]["response"]["output"]
    texts = {
        item["id"]: item.get("arguments") or "".join(p["text"] for p in item.get("content", []))
        for item in items
    }
    assert {name: text for name, text in texts.items() if text} == deltas
    kinds = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
    for kind, item_type in kinds.items():
        said = "".join(text for each, text in script if each == kind)
        assert "".join(texts[item["id"]] for item in items if item["type"] == item_type) == said
    calls = [item for item in items if item["type"] == "function_call"]
    assert len({call["call_id"] for call in calls}) == len(calls) == sum(kind == "call" for kind, _ in script)


@settings(deadline=None)
@given(data=st.data())
def test_items_come_one_after_another_in_the_official_order(scripted_outputs, data) -> None:
    _, output = data.draw(scripted_outputs)
    _, _, told = events_of(output)
    names = [event["type"].removeprefix("response.") for event in told]
    names = [
        name for index, name in enumerate(names) if name != names[index - 1] or not name.endswith(".delta")
    ]
    follows = {
        "created": {"in_progress"},
        "in_progress": {"output_item.added"},
        "output_item.added": {
            "content_part.added", "function_call_arguments.delta", "function_call_arguments.done",
        },
        "content_part.added": {"output_text.delta", "reasoning_text.delta", "output_text.done"},
        "output_text.delta": {"output_text.done"},
        "reasoning_text.delta": {"reasoning_text.done"},
        "function_call_arguments.delta": {"function_call_arguments.done"},
        "output_text.done": {"content_part.done"},
        "reasoning_text.done": {"content_part.done"},
        "content_part.done": {"output_item.done"},
        "function_call_arguments.done": {"output_item.done"},
        "output_item.done": {"output_item.added", "completed", "incomplete"},
    }  # fmt: skip
    assert names[0] == "created"
    assert names[-1] in ("completed", "incomplete")
    for name, following in pairwise(names):
        assert following in follows[name], (name, following)


def test_a_cut_response_is_incomplete_and_so_is_its_last_item() -> None:
    response = whole(ended(ReasoningDelta("hm"), ContentDelta("a"), reason="length"))
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    response = whole(ended(ContentDelta("a")))
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert response["usage"]["total_tokens"] == 13


def test_an_answer_of_nothing_is_a_message_without_text() -> None:
    (item,) = whole(ended())["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_pieces_of_a_call_that_was_told_already_are_shown() -> None:
    late = ended(ToolCallDelta(0, "f", "{}"), ContentDelta("a"), ToolCallDelta(0, None, "late"))
    call, message = whole(late)["output"]
    assert (call["arguments"], message["content"][0]["text"]) == ("{}", "alate")


@pytest.mark.parametrize(
    ("error", "name", "status"),
    [
        (GenerationFailed("it broke"), "response.failed", "failed"),
        (RequestCancelled("stop"), "response.incomplete", "cancelled"),
    ],
)
def test_a_response_that_ends_early_says_how_and_keeps_what_there_was(error, name, status) -> None:
    kept = []
    answer = ResponseAnswer("resp_1", HEAD, kept.append)
    answer.opening()
    answer.of(OutputDelta((ContentDelta("half"),)))
    *_, last = answer.failed(error)
    assert (last["type"], last["response"]["status"]) == (name, status)
    assert last["response"]["output"][0]["content"][0]["text"] == "half"
    assert kept == [last["response"]]
    fault = {"code": "generation_failed", "message": "it broke"}
    assert last["response"]["error"] == (fault if status == "failed" else None)
