"""What Anthropic's bodies mean, and that each refusal names its field."""

import json
from datetime import date

import pytest
from darkbloom_dialects._anthropic_bodies import MessagesBody
from darkbloom_dialects._anthropic_request import asked_message

from darkbloom_core.contracts import AnswerFormat, JsonText, TextPart, Tool, ToolCall
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.media import MediaSource
from darkbloom_core.server import read_json

TODAY = date(2026, 1, 2)
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def asked(messages=HELLO, **fields):
    body = {"model": "m", "messages": messages, "max_tokens": 5, **fields}
    return asked_message(read_json(json.dumps(body).encode(), MessagesBody), TODAY)


def chat(messages=HELLO, **fields):
    return asked(messages, **fields).request.source


def refused(**fields):
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    return caught.value


def text(value, **fields):
    return {"type": "text", "text": value, **fields}


def test_sampling_limits_and_stops_are_taken() -> None:
    request = asked(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["a", "b", "a"], stream=True).request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (request.max_tokens, request.stop, request.streamed) == (5, ("a", "b"), True)
    assert request.source.today == TODAY


def test_system_is_the_first_message() -> None:
    for system in ("a\n\nb", [text("a", cache_control={"type": "ephemeral"}), text("b")]):
        first, second = chat(system=system).messages
        assert (first.role, first.text, second.role) == ("system", "a\n\nb", "user")
    assert len(chat(system="").messages) == 1


def test_a_conversation_with_tools_keeps_its_order() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}}
    thinking = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [text("r"), text("s")]},
        {"type": "tool_result", "tool_use_id": "2", "content": "bad", "is_error": True},
        {"type": "tool_result", "tool_use_id": "3"},
        text("and now?"),
    ]
    first, second, *rest = chat(
        [
            *HELLO,
            {"role": "assistant", "content": [*thinking, text("so"), use]},
            {"role": "user", "content": results},
        ]
    ).messages
    assert (first.role, second.reasoning, second.text) == ("user", "hm", "so")
    assert second.tool_calls == (ToolCall("1", "f", {"a": [1]}),)
    assert [(each.role, each.tool_call_id, each.text) for each in rest] == [
        ("tool", "1", "r\ns"),
        ("tool", "2", "Error: bad"),
        ("tool", "3", ""),
        ("user", None, "and now?"),
    ]
    assert first.content == (TextPart("hello"),)


def test_tools_and_how_they_may_be_used() -> None:
    tools = [{**TOOL, "description": "d", "type": "custom", "cache_control": {"type": "ephemeral"}}]
    for choice, expected in (
        (None, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "f"}, ("required", "f", True)),
        ({"type": "none"}, ("none", None, True)),
    ):
        it = chat(tools=tools, tool_choice=choice)
        assert (it.tool_choice, it.named_tool, it.parallel_tool_calls) == expected
        schema, where = {"type": "object"}, "tools[0].input_schema"
        assert it.tools == (Tool(name="f", description="d", parameters=schema, origin=where),)
    assert [tool.strict for tool in chat(tools=[{**TOOL, "strict": True}]).tools] == [True]


@pytest.mark.parametrize(
    ("fields", "effort", "shows"),
    [
        ({}, None, False),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, None, False),
        ({"thinking": {"type": "adaptive"}}, "medium", True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low", True),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "medium", True),
        ({"thinking": {"type": "enabled", "budget_tokens": 16384}}, "high", True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low", True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}}, "high", True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high", True),
    ],
    ids=str,
)
def test_thinking_is_an_effort_and_whether_it_is_shown(fields, effort, shows) -> None:
    it = asked(**fields)
    assert (it.request.source.reasoning_effort, it.shows_thinking) == (effort, shows)


FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


def test_the_format_of_the_answer_is_taken_from_either_place() -> None:
    for fields, origin in (
        ({"output_config": {"format": FORMAT}}, "output_config.format.schema"),
        ({"output_format": FORMAT}, "output_format.schema"),
    ):
        text = JsonText({"type": "object"}, origin)
        assert chat(**fields).answer == AnswerFormat(text=text, name="answer")
    assert chat(output_config={"effort": "low"}).answer is None


IMAGE = {"type": "image", "source": {"type": "base64", "data": "QUJD", "media_type": "image/png"}}


def shown(**source):
    return {"role": "user", "content": [{"type": "image", "source": source}]}


def test_images_of_users_and_of_tools_keep_their_place_and_name_their_field() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("a"), IMAGE, text("b")]}
    link = {"type": "image", "source": {"type": "url", "url": "data:,x"}}
    content = [text("see"), IMAGE, text("and"), result, link, text("?")]
    first, tool, last = chat([{"role": "user", "content": content}]).messages
    assert [part if isinstance(part, TextPart) else part.source for part in first.content] == [
        TextPart("see"),
        MediaSource("image", "data:image/png;base64,QUJD", "messages[0].content[1].source"),
        TextPart("and"),
    ]
    assert (tool.role, tool.text) == ("tool", "a\nb")
    assert tool.content[1].source.where == "messages[0].content[3].content[1].source"
    assert last.content[0].source == MediaSource("image", "data:,x", "messages[0].content[4].source.url")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}, *HELLO]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"messages": [shown(type="base64", data="")]}, "messages[0].content[0].source.media_type"),
        ({"messages": [shown(type="base64", media_type="image/png")]}, "messages[0].content[0].source.data"),
        ({"messages": [shown(type="url")]}, "messages[0].content[0].source.url"),
        ({"messages": [shown(type="file", file_id="x")]}, "messages[0].content[0].source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 5}]}]},
            "messages[0].content[0].content",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}, *HELLO]},
            "messages[0].content[0].input",
        ),
        ({"system": [IMAGE]}, "system[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": 2.5}, "temperature"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ],
    ids=str,
)  # fmt: skip
def test_a_refusal_names_its_field(fields, param) -> None:
    error = refused(**fields)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
