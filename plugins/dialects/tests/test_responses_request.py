"""What a body of the Responses API means, and that each refusal names its field."""

import json
from datetime import date

import pytest
from darkbloom_dialects._responses_bodies import InputItem, ResponsesBody
from darkbloom_dialects._responses_request import asked_response, output_items

from darkbloom_core.contracts import AnswerFormat, JsonText, TextPart, Tool, ToolCall
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.media import MediaSource
from darkbloom_core.server import read_json

TODAY = date(2026, 1, 2)
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


def asked(given="hello", earlier=(), **fields):
    body = read_json(json.dumps({"model": "m", "input": given, **fields}).encode(), ResponsesBody)
    return asked_response(body, earlier, TODAY, 10)


def chat(given="hello", **fields):
    return asked(given, **fields).request.source


def said(messages):
    return [
        (each.role, each.text, each.reasoning, [call.id for call in each.tool_calls]) for each in messages
    ]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(name, **fields):
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": '{"a": 1}', **fields}


def output(name, text="r"):
    return {"type": "function_call_output", "call_id": name, "output": text}


def reasoning(text, place="content"):
    return {"type": "reasoning", "summary": [], place: [{"type": "reasoning_text", "text": text}]}


def test_plain_text_is_one_turn_and_instructions_come_first() -> None:
    request = asked(
        instructions="be brief", temperature=0.5, top_p=0.9, max_output_tokens=5, stream=True
    ).request
    assert said(request.source.messages) == [("system", "be brief", None, []), ("user", "hello", None, [])]
    assert (request.sampling.temperature, request.sampling.top_p, request.max_tokens) == (0.5, 0.9, 5)
    assert (request.streamed, request.source.today) == (True, TODAY)


def test_items_of_one_turn_become_one_message() -> None:
    items = [
        user("q"), reasoning("hm"), assistant("so"), call("1"), call("2"), output("1"), output("2"),
        reasoning("aha", "summary"), assistant("done"), assistant("really"), user("thanks"),
    ]  # fmt: skip
    messages = chat(items).messages
    assert said(messages) == [
        ("user", "q", None, []),
        ("assistant", "so", "hm", ["1", "2"]),
        ("tool", "r", None, []),
        ("tool", "r", None, []),
        ("assistant", "done", "aha", []),
        ("assistant", "really", None, []),
        ("user", "thanks", None, []),
    ]
    assert messages[1].tool_calls[0] == ToolCall("1", "f", {"a": 1})
    assert [each.tool_call_id for each in messages[2:4]] == ["1", "2"]


def test_earlier_items_come_before_the_new_ones() -> None:
    first = asked([user("a")])
    made = tuple(output_items([{**assistant("b"), "id": "msg_1", "status": "completed"}]))
    second = asked("c", earlier=(*first.items, *made))
    assert [message.text for message in second.request.source.messages] == ["a", "b", "c"]
    assert all(item.id for item in second.items)


def test_arguments_that_are_no_object_can_still_be_gone_on_from() -> None:
    (item,) = output_items([{**call("1"), "arguments": '{"a"'}])
    assert chat(earlier=(item,)).messages[0].tool_calls[0].arguments == {"arguments": '{"a"'}


def test_tools_and_how_they_may_be_used() -> None:
    for choice, expected in (
        (None, ("auto", None)),
        ("none", ("none", None)),
        ("required", ("required", None)),
        ({"type": "function", "name": "f"}, ("required", "f")),
    ):
        it = chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, reasoning={"effort": "low"})
        assert (it.tool_choice, it.named_tool) == expected
        fields = {"parameters": {"type": "object"}, "strict": True, "origin": "tools[0].parameters"}
        assert it.tools == (Tool(name="f", description="d", **fields),)
        assert (it.parallel_tool_calls, it.reasoning_effort) == (False, "low")


def test_the_format_of_the_answer() -> None:
    fields = {"name": "x", "schema": {"type": "object"}, "description": "d"}
    for strict in (True, False):
        answer = chat(text={"format": {"type": "json_schema", "strict": strict, **fields}}).answer
        text = JsonText({"type": "object"}, "text.format.schema", lenient=not strict)
        assert answer == AnswerFormat(text=text, name="x", description="d")
    anything = JsonText({"type": "object"}, "text.format")
    assert chat(text={"format": {"type": "json_object"}}).answer == AnswerFormat(text=anything)
    for text in (None, {}, {"format": {"type": "text"}}, {"verbosity": "low"}):
        assert chat(text=text).answer is None


def shown(role, **fields):
    return [{"role": role, "content": [{"type": "input_image", "detail": "auto", **fields}]}]


def test_images_of_users_and_of_tools_keep_their_place_and_name_their_field() -> None:
    image = {"type": "input_image", "image_url": "data:,x"}
    user_content = [{"type": "input_text", "text": "see"}, image, {"type": "input_text", "text": "?"}]
    items = [{"role": "user", "content": user_content}, call("1"), output("1", [image])]
    first, _, tool = chat(items).messages
    assert [part if isinstance(part, TextPart) else part.source for part in first.content] == [
        TextPart("see"),
        MediaSource("image", "data:,x", "input[0].content[1].image_url"),
        TextPart("?"),
    ]
    assert [part.source.where for part in tool.content] == ["input[2].output[0].image_url"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": shown("system", image_url="data:,")}, "input[0].content[0]"),
        ({"input": shown("assistant", image_url="data:,")}, "input[0].content[0]"),
        ({"input": shown("user")}, "input[0].content[0].image_url"),
        ({"input": shown("user", file_id="x")}, "input[0].content[0].file_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "odd"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [call("1", arguments="[1]")]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x y", "schema": {}}}}, "text.format.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ],
    ids=str,
)
def test_a_refusal_names_its_field(fields, param) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(fields.pop("input", "hello"), **fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")


def test_an_item_needs_no_type_to_be_a_message() -> None:
    assert InputItem(role="user", content="x").type == "message"


def test_metadata_may_be_sixteen_texts_of_512_characters() -> None:
    notes = {f"{number:0512}": "x" * 512 for number in range(16)}
    assert asked(metadata=notes).body.metadata == notes
