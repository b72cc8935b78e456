"""What the fields of a body mean, and that nothing that would change an answer is ignored."""

import json
from datetime import date

import pytest

from darkbloom_core.contracts import AnswerFormat, JsonText, LarkText, RegexText, TextPart, Tool, ToolCall
from darkbloom_core.engine import SamplingParams
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.media import MediaSource
from darkbloom_core.server._bodies import ChatCompletionBody, CompletionBody, read_json
from darkbloom_core.server._convert import COMPLETION_DEFAULT_TOKENS, chat_request, completion_request
from darkbloom_core.server._requests import AskedMedia

TODAY = date(2026, 1, 2)
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


def chat(messages=None, **fields):
    body = {"model": "m", "messages": messages or [{"role": "user", "content": "hello"}], **fields}
    return chat_request(read_json(json.dumps(body).encode(), ChatCompletionBody), TODAY)


def completion(**fields):
    body = {"model": "m", "prompt": "hello", **fields}
    return completion_request(read_json(json.dumps(body).encode(), CompletionBody))


def refused(convert, *arguments, **fields) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        convert(*arguments, **fields)
    return caught.value.param


def message_of(message):
    return chat([message]).source.messages[0]


def test_content_is_text_parts_or_nothing() -> None:
    assert message_of({"role": "user", "content": "a"}).content == (TextPart("a"),)
    assert message_of({"role": "user", "content": ""}).content == ()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    assert message_of({"role": "developer", "content": parts}).text == "ab"
    assert message_of({"role": "assistant", "content": None}).content == ()
    assert message_of({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}).text == "no"


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_only_an_assistant_may_say_nothing(role) -> None:
    assert refused(chat, [{"role": role, "tool_call_id": "1"}]) == "messages[0].content"
    assert refused(chat, [{"role": role, "tool_call_id": "1", "content": None}]) == "messages[0].content"


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_pictures_and_videos_are_taken_in_their_place_with_the_field_they_came_in(kind, role) -> None:
    for given, field in (({"url": "data:,"}, f"{kind}.url"), ("data:,", kind)):
        content = [{"type": "text", "text": "a"}, {"type": kind, kind: given}, {"type": "text", "text": "b"}]
        first, media, last = message_of({"role": role, "tool_call_id": "1", "content": content}).content
        assert (first, last) == (TextPart("a"), TextPart("b"))
        assert isinstance(media, AskedMedia)
        assert media.source == MediaSource(kind[:5], "data:,", f"messages[0].content[1].{field}")


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
def test_only_users_and_tools_may_show_anything(kind) -> None:
    for role in ("system", "developer", "assistant"):
        with pytest.raises(InvalidRequest, match=f"role {role} cannot hold") as caught:
            chat([{"role": role, "content": [{"type": kind, kind: {"url": "data:,"}}]}])
        assert caught.value.param == "messages[0].content[0]"
    assert refused(chat, [{"role": "user", "content": [{"type": kind}]}]) == f"messages[0].content[0].{kind}"
    odd = {"type": kind, kind: {"link": "data:,"}}
    assert refused(chat, [{"role": "user", "content": [odd]}]) == f"messages[0].content[0].{kind}.url"


@pytest.mark.parametrize("kind", ["image", "input_image", "video", "input_video", "input_audio", "file"])
def test_other_media_are_refused_by_their_name(kind) -> None:
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:,"}}],
    }
    with pytest.raises(InvalidRequest, match="this model does not accept") as caught:
        chat([message])
    assert caught.value.param == "messages[0].content[1]"


def test_unknown_parts_are_refused() -> None:
    assert refused(chat, [{"role": "user", "content": [{"type": "smell"}]}]) == "messages[0].content[0].type"
    assert refused(chat, [{"role": "user", "content": [{"type": "text"}]}]) == "messages[0].content[0].text"


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}], ids=["text", "object"])
def test_arguments_of_past_calls_become_objects(arguments) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    message = message_of({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message.tool_calls == (ToolCall("c1", "weather", {"city": "Oslo"}),)


def test_arguments_may_be_empty() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": " "}}
    assert message_of({"role": "assistant", "tool_calls": [call]}).tool_calls[0].arguments == {}


@pytest.mark.parametrize("arguments", ["{", "[]", "5", '{"a": NaN}', "{} {}"])
def test_arguments_that_are_no_object_are_refused(arguments) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    where = "messages[0].tool_calls[0].function.arguments"
    assert refused(chat, [{"role": "assistant", "tool_calls": [call]}]) == where


def test_tool_messages_say_which_call_they_answer() -> None:
    message = message_of({"role": "tool", "tool_call_id": "c1", "content": "rain"})
    assert (message.tool_call_id, message.text) == ("c1", "rain")
    assert refused(chat, [{"role": "tool", "content": "rain"}]) == "messages[0].tool_call_id"


def test_only_assistants_call_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather"}}
    message = {"role": "user", "content": "a", "tool_calls": [call]}
    assert refused(chat, [message]) == "messages[0].tool_calls"


def test_reasoning_of_past_turns_is_kept() -> None:
    message = message_of({"role": "assistant", "content": "a", "reasoning_content": "because"})
    assert message.reasoning == "because"


def test_tools_and_choices() -> None:
    asked = chat(tools=[TOOL]).source
    assert asked.tools == (
        Tool(name="lookup", parameters={"type": "object"}, origin="tools[0].function.parameters"),
    )
    assert (asked.tool_choice, asked.named_tool, asked.parallel_tool_calls) == ("auto", None, True)
    assert chat(tools=[TOOL], tool_choice="none").source.tool_choice == "none"
    assert chat(tools=[TOOL], parallel_tool_calls=False).source.parallel_tool_calls is False
    named = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "lookup"}}).source
    assert (named.tool_choice, named.named_tool) == ("required", "lookup")


def test_choices_of_tools_that_are_not_there_are_refused() -> None:
    assert refused(chat, tool_choice="required") == "tool_choice"
    named = {"type": "function", "function": {"name": "other"}}
    assert refused(chat, tools=[TOOL], tool_choice=named) == "tool_choice.function.name"
    assert refused(chat, tools=[TOOL, TOOL]) == "tools[1].function.name"


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": []},
        {"function_call": "auto"},
        {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]},
        {"web_search_options": {}},
    ],
    ids=str,
)
def test_what_would_change_the_answer_and_is_not_supported_is_refused(fields) -> None:
    (name,) = fields
    assert refused(chat, **fields) == name


def test_what_says_the_default_is_not_refused() -> None:
    assert chat(modalities=["text"], response_format={"type": "text"}) == chat()


def test_both_names_of_the_token_limit_mean_the_same() -> None:
    assert chat().max_tokens is None
    assert chat(max_tokens=None, max_completion_tokens=None).max_tokens is None
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=6).max_tokens == 6
    assert chat(max_tokens=7, max_completion_tokens=7).max_tokens == 7
    assert refused(chat, max_tokens=7, max_completion_tokens=8) == "max_tokens"


def test_sampling_lies_over_the_checkpoints_defaults() -> None:
    defaults = SamplingParams(temperature=0.7, top_k=40, top_p=0.9)
    assert chat().sampling.over(defaults) == defaults
    said = chat(temperature=0, top_k=-1, seed=-5, logit_bias={"7": -100}, presence_penalty=1).sampling
    assert said.over(defaults) == SamplingParams(
        temperature=0, top_k=0, top_p=0.9, seed=-5, logit_bias={7: -100.0}, presence_penalty=1
    )


@pytest.mark.parametrize(
    "bias", [{"a": 1}, {"-1": 1}, {"1.0": 1}, {"٣": 1}, {"9" * 30: 1}, {"1": 101}, {"1": "x"}, {"1": True}]
)
def test_bad_logit_bias_is_refused(bias) -> None:
    assert refused(chat, logit_bias=bias) == "logit_bias"


def test_logprobs() -> None:
    assert chat().sampling.logprobs is None
    assert chat(logprobs=False).sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling.logprobs == 5
    assert refused(chat, top_logprobs=5) == "top_logprobs"


def test_stop_strings_are_one_or_several() -> None:
    assert chat().stop == ()
    assert chat(stop=[]).stop == ()
    assert chat(stop="a").stop == ("a",)
    assert chat(stop=["a", "b", "a"]).stop == ("a", "b")


def test_streaming_options() -> None:
    assert not chat().streamed
    assert not chat(stream=True).include_usage
    asked = chat(stream=True, stream_options={"include_usage": True}, n=3)
    assert (asked.streamed, asked.include_usage, asked.choices) == (True, True, 3)


def test_a_completion_continues_its_prompt() -> None:
    asked = completion(prompt=["once"])
    assert (asked.source, asked.operation, asked.max_tokens) == (
        "once",
        "text_completion",
        COMPLETION_DEFAULT_TOKENS,
    )
    assert completion(max_tokens=5, best_of=2, n=2).max_tokens == 5


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}], ids=str)
def test_completions_refuse_what_they_cannot_do(fields) -> None:
    (name,) = fields
    assert refused(completion, **fields) == name


def test_logprobs_of_a_completion_are_a_number_up_to_five() -> None:
    assert completion().sampling.logprobs is None
    assert [completion(logprobs=count).sampling.logprobs for count in (0, 5)] == [0, 5]
    for wrong in (6, -1, "x", "2", True, 2.5):
        assert refused(completion, logprobs=wrong) == "logprobs"


def test_the_day_is_handed_on() -> None:
    assert chat().source.today == TODAY
    assert chat(reasoning_effort="low").source.reasoning_effort == "low"


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"type": "json_object"}, AnswerFormat(text=JsonText({"type": "object"}, "response_format"))),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "description": "d", "schema": SCHEMA, "strict": True},
            },
            AnswerFormat(
                text=JsonText(SCHEMA, "response_format.json_schema.schema"), name="x", description="d"
            ),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            AnswerFormat(text=JsonText(SCHEMA, "response_format.json_schema.schema", lenient=True), name="x"),
        ),
        (
            {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: A"}},
            AnswerFormat(text=LarkText("start: A", "response_format.grammar.definition")),
        ),
        (
            {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}},
            AnswerFormat(text=RegexText("a+", "response_format.grammar.definition")),
        ),
    ],
    ids=["object", "strict schema", "schema", "lark", "regex"],
)
def test_response_formats(asked, answer) -> None:
    assert chat(response_format=asked).source.answer == answer


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a b"}}, "response_format.json_schema.name"),
        ({"type": "grammar"}, "response_format.grammar"),
        (
            {"type": "grammar", "grammar": {"syntax": "ebnf", "definition": ""}},
            "response_format.grammar.syntax",
        ),
    ],
)
def test_unknown_response_formats_are_refused(asked, param) -> None:
    assert refused(chat, response_format=asked) == param


def test_text_completions_have_no_format() -> None:
    assert refused(completion, response_format={"type": "json_object"}) == "response_format"
