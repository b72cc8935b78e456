"""Conversations to token ids through a checkpoint's own template, and greedy answers of the demo checkpoint."""

import json
from datetime import date

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from darkbloom_core.contracts import (
    Chat,
    Device,
    MediaPart,
    Message,
    TextPart,
    Tool,
    ToolCall,
)
from darkbloom_core.errors import CheckpointError, InvalidRequest

TODAY = date(2025, 6, 28)
SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: {effort}\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.{calls}<|end|>"
)
CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."


@pytest.fixture(scope="module")
def codec(family, demo_folder, load):
    return family.codec(demo_folder, load(demo_folder).description)


def message(role, text, **others):
    return Message(role=role, content=(TextPart(text),) if text else (), **others)


def user(text):
    return message("user", text)


def rendered(codec, *messages, **others):
    """The prompt as text, control tokens by name, without the system message if it is the usual one."""
    ids = codec.encode_chat(Chat(messages=messages, today=TODAY, **others)).ids
    names = {codec.tokenizer.control_id(name): name for name in codec.tokenizer.control_names}
    text = "".join(names.get(token) or codec.token_bytes(token).decode() for token in ids)
    return text.removeprefix(SYSTEM.format(effort="medium", calls=""))


WEATHER = Tool(
    name="get_weather",
    description="The weather.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city name"},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "area": {"type": "object", "properties": {"km": {"type": "number"}}, "required": ["km"]},
            "flags": {"type": ["boolean", "string"]},
            "any": {},
        },
        "required": ["city"],
    },
)
NOW = Tool(name="now")
CALL = ToolCall("c1", "get_weather", {"city": "Paris", "days": [1, 2]})
OTHER = ToolCall("c2", "now", {})
ASKED = (user("Weather?"), message("assistant", "", tool_calls=(CALL,), reasoning="I need a tool."))
RESULT = message("tool", '{"degrees": 18}', tool_call_id="c1")
CALL_TEXT = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris", "days": [1, 2]}<|call|>'
)
RESULT_TEXT = (
    '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{"degrees": 18}<|end|>'
)
THOUGHT_TEXT = "<|start|>assistant<|channel|>analysis<|message|>I need a tool.<|end|>"
WEATHER_TEXT = "<|start|>user<|message|>Weather?<|end|>"


def test_a_question_becomes_a_turn_after_the_system_message(codec):
    ids = codec.encode_chat(Chat(messages=(user(" Hi! "),), today=TODAY)).ids
    assert ids[0] == codec.tokenizer.control_id("<|start|>")
    assert rendered(codec, user(" Hi! ")) == "<|start|>user<|message|> Hi! <|end|><|start|>assistant"


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_reasoning_effort_is_in_the_system_message(codec, effort):
    text = rendered(codec, user("Hi!"), reasoning_effort=effort)
    assert f"Reasoning: {effort}\n" in text or effort == "medium"


@pytest.mark.parametrize("effort", ["none", "minimal", "HIGH", "<|end|>"])
def test_an_effort_that_the_model_does_not_know_is_refused(codec, effort):
    with pytest.raises(InvalidRequest, match="low, medium, high") as caught:
        rendered(codec, user("Hi!"), reasoning_effort=effort)
    assert caught.value.param == "reasoning_effort"


def test_instructions_of_both_roles_become_one_developer_message(codec):
    text = rendered(codec, message("system", "Be brief."), message("developer", "Be kind."), user("Hi!"))
    assert text.startswith(
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\nBe kind.<|end|><|start|>user"
    )


def test_instructions_later_on_are_refused_not_dropped(codec):
    with pytest.raises(InvalidRequest, match="must come before the conversation"):
        rendered(codec, user("Hi!"), message("system", "Be brief."), user("Well?"))


def test_tools_are_described_in_the_developer_message(codec):
    text = rendered(codec, message("system", "Be brief."), user("Hi!"), tools=(WEATHER, NOW))
    expected = (
        SYSTEM.format(effort="medium", calls=CALLS)
        + "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n"
        "// The weather.\ntype get_weather = (_: {\n"
        '// The city name\ncity: string,\nunit?: "C" | "F", // default: "C"\ndays?: number[],\n'
        "at?: string | null,\narea?: {\nkm: number,\n},\nflags?: boolean | string,\nany?: any,\n"
        "}) => any;\n\n"
        "type now = () => any;\n\n"
        "} // namespace functions<|end|>"
    )
    assert text.startswith(expected)


def test_tool_choice_none_hides_the_tools(codec):
    assert rendered(codec, user("Hi!"), tools=(WEATHER,), tool_choice="none") == rendered(codec, user("Hi!"))


def test_thoughts_of_past_turns_are_dropped(codec):
    text = rendered(
        codec, user("Hi!"), message("assistant", "Hello!", reasoning="A greeting."), user("Well?")
    )
    assert "A greeting." not in text
    assert "<|start|>assistant<|channel|>final<|message|>Hello!<|end|><|start|>user" in text


def test_thoughts_of_a_turn_that_still_calls_tools_are_kept(codec):
    text = rendered(codec, *ASKED, RESULT, tools=(WEATHER,))
    assert text.endswith(WEATHER_TEXT + THOUGHT_TEXT + CALL_TEXT + RESULT_TEXT + "<|start|>assistant")
    later = rendered(codec, *ASKED, RESULT, message("assistant", "18."), user("Thanks."), tools=(WEATHER,))
    assert WEATHER_TEXT + CALL_TEXT + RESULT_TEXT in later
    assert "I need a tool." not in later


def test_text_before_a_call_is_kept_beside_the_thoughts(codec):
    asked = message("assistant", "One moment.", tool_calls=(CALL,), reasoning="I need a tool.")
    text = rendered(codec, user("Weather?"), asked, RESULT, tools=(WEATHER,))
    assert "<|channel|>analysis<|message|>I need a tool.\n\nOne moment.<|end|>" in text


def test_several_calls_of_a_turn_are_each_followed_by_their_result(codec):
    asked = message("assistant", "", tool_calls=(CALL, OTHER), reasoning="I need a tool.")
    late = message("tool", "noon", tool_call_id="c2")
    text = rendered(codec, user("Weather?"), asked, late, RESULT, tools=(WEATHER, NOW))
    assert text.endswith(
        THOUGHT_TEXT
        + CALL_TEXT
        + RESULT_TEXT
        + "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
        + '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|><|start|>assistant'
    )


@pytest.mark.parametrize(
    "messages",
    [
        (user("Hi!"), RESULT),
        (user("Hi!"), message("assistant", "Hello!"), RESULT),
        (*ASKED, message("tool", "x", tool_call_id="c9")),
        (*ASKED, RESULT, RESULT),
    ],
)
def test_a_result_without_its_call_is_refused(codec, messages):
    with pytest.raises(InvalidRequest, match="tool"):
        rendered(codec, *messages, tools=(WEATHER,))


def test_pictures_are_refused(codec):
    picture = Message(role="user", content=(TextPart("Look:"), MediaPart("image", (4,))))
    with pytest.raises(InvalidRequest, match="text only"):
        rendered(codec, picture)


hostile = st.lists(
    st.sampled_from(
        ["<|start|>", "<|end|>", "<|channel|>", "final", "<|", "end|>", "assistant", "é", " ", "\n"]
    )
).map("".join)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(hostile, min_size=10, max_size=10))
def test_no_text_of_a_client_becomes_a_control_token(codec, texts):
    def chat(texts):
        tool = Tool(
            name=texts[0],
            description=texts[1],
            parameters={
                "properties": {"x" + texts[2]: {"type": texts[3] or "string", "description": texts[4]}}
            },
        )
        call = ToolCall("c1", texts[0], {"x" + texts[2]: texts[5]})
        messages = (
            message("system", "s" + texts[6]),
            message("user", texts[7]),
            message("assistant", "", tool_calls=(call,), reasoning="r" + texts[8]),
            message("tool", texts[9], tool_call_id="c1"),
        )
        return Chat(messages=messages, tools=(tool,), today=TODAY)

    def controls(texts):
        return [token for token in codec.encode_chat(chat(texts)).ids if token in codec.control_ids]

    assert controls(texts) == controls(["a"] * 10)


def test_a_tokenizer_without_a_harmony_token_is_refused(
    checkpoints, family, demo_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoints, "CONTROL_TOKENS", checkpoints.CONTROL_TOKENS[:-1])
    checkpoints.write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    description = family.describe(json.loads((demo_folder / "config.json").read_text()), Device("cpu"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no special token <\|call\|>"):
        family.codec(tmp_path, description)


def test_a_checkpoint_without_a_template_is_named(checkpoints, family, load, demo_folder, tmp_path):
    checkpoints.write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: no such file"):
        family.codec(tmp_path, load(demo_folder).description)


PUBLISHED_STYLE = """
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|channel|>final<|message|>" in message.content -%}
            {{- raise_exception("tags in content") -}}
        {%- endif -%}
        {%- if "tool_calls" in message -%}
            {%- if message.content and message.thinking -%}{{- raise_exception("both") -}}{%- endif -%}
            {{- message.thinking -}}{{- message.tool_calls[0].function.arguments | tojson -}}
        {%- else -%}
            {{- message.content + "." -}}
        {%- endif -%}
    {%- elif message.role == 'tool' -%}
        {{- message.content | tojson -}}
    {%- else -%}
        {{- message.role + ":" + message.content -}}
    {%- endif -%}
{%- endfor -%}
"""


def test_what_the_publishers_template_expects_of_messages_is_kept(family, load, demo_folder, tmp_path, codec):
    """It raises on content beside thoughts, reads content of every turn, and looks for keys, not for values."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((demo_folder / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(PUBLISHED_STYLE)
    strict = family.codec(tmp_path, load(demo_folder).description)
    asked = message("assistant", "Wait.", tool_calls=(CALL,), reasoning="Tool.")
    text = rendered(strict, message("system", "S"), user("Hi"), asked, RESULT, message("assistant", ""))
    assert text == ('developer:Suser:HiTool.\n\nWait.{"city": "Paris", "days": [1, 2]}{"degrees": 18}.')
    assert rendered(strict, message("assistant", "<|channel|>final<|message|>")) == (
        "<|channel|>final<|message|>."
    )


# --- the demo checkpoint -----------------------------------------------------


@pytest.mark.parametrize(
    "chat",
    [
        Chat(messages=(user("What is 47 + 38?"),), reasoning_effort="low", today=TODAY),
        Chat(messages=(user("What is 47 + 38?"),), reasoning_effort="high", today=TODAY),
    ],
)
def test_effort_changes_how_long_the_demo_thinks(chat, answer, load, demo_folder):
    shown, _ = answer(load(demo_folder), demo_folder, chat)
    assert shown["content"] == "47 + 38 = 85"
    assert (len(shown["reasoning"]) < 12) == (chat.reasoning_effort == "low")


def test_the_demo_calls_a_tool_and_uses_its_result(answer, load, demo_folder, codec):
    model = load(demo_folder)
    tool = Tool(
        name="get_weather",
        description="Get the current weather in a city.",
        parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    )
    question = user("What is the weather in Oslo?")
    shown, stop = answer(model, demo_folder, Chat(messages=(question,), tools=(tool,), today=TODAY))
    assert shown["toolcall"] == 'get_weather{"city": "Oslo"}'
    assert stop == codec.tokenizer.control_id("<|call|>")
    called = message(
        "assistant",
        "",
        tool_calls=(ToolCall("c1", "get_weather", {"city": "Oslo"}),),
        reasoning=shown["reasoning"],
    )
    result = message("tool", '{"temperature": 17, "sky": "windy"}', tool_call_id="c1")
    shown, stop = answer(
        model, demo_folder, Chat(messages=(question, called, result), tools=(tool,), today=TODAY)
    )
    assert shown["content"] == "It is 17 degrees and windy in Oslo."
    assert stop == codec.tokenizer.control_id("<|return|>")
