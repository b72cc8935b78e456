"""Prompts are what the checkpoint's template says, control tokens come from it alone, and nothing is left out silently."""

import pytest
from darkbloom_qwen3._codec import Qwen3Codec

from darkbloom_core.contracts import Chat, MediaPart, Message, ReasoningDelta, TextPart, Tool, ToolCall
from darkbloom_core.errors import InvalidRequest


@pytest.fixture(scope="module")
def codec(folder):
    return Qwen3Codec(folder("transformers"))


@pytest.fixture
def shown(codec, checkpoints):
    """Text of token ids, control tokens by their names in brackets of their own."""
    names = dict(enumerate(checkpoints.CONTROL_TOKENS, start=256))

    def shown(ids):
        return b"".join(
            f"[{names[token]}]".encode() if token in names else codec.token_bytes(token) for token in ids
        ).decode()

    return shown


def say(role, text, **more):
    return Message(role=role, content=(TextPart(text),), **more)


WEATHER = Tool(name="get_weather", description="Weather of a city", parameters={"type": "object"})


def test_a_conversation_becomes_turns_up_to_where_the_model_answers(codec, shown):
    chat = Chat(messages=(say("developer", "Be brief."), say("user", "Hi!")))
    assert shown(codec.encode_chat(chat).ids) == (
        "[<|im_start|>]system\nBe brief.[<|im_end|>]\n[<|im_start|>]user\nHi![<|im_end|>]\n[<|im_start|>]assistant\n"
    )


def test_effort_none_closes_the_thought_before_it_begins(codec, shown):
    chat = Chat(messages=(say("user", "Hi!"),), reasoning_effort="none")
    assert shown(codec.encode_chat(chat).ids).endswith("assistant\n[<think>]\n\n[</think>]\n\n")


def test_calls_results_and_thoughts_are_rendered(codec, shown):
    call = ToolCall("a", "get_weather", {"city": "Oslo"})
    chat = Chat(
        messages=(
            say("user", "Weather?"),
            say("assistant", "", reasoning="I ask.", tool_calls=(call,)),
            say("tool", "sunny", tool_call_id="a"),
        ),
        tools=(WEATHER,),
    )
    text = shown(codec.encode_chat(chat).ids)
    assert (
        '"name": "get_weather", "description": "Weather of a city", "parameters": {"type": "object"}' in text
    )
    assert "[<think>]\nI ask.\n[</think>]" in text
    assert '[<tool_call>]\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n[</tool_call>]' in text
    assert "[<tool_response>]\nsunny\n[</tool_response>]" in text


def test_results_stand_in_the_order_of_their_calls(codec, shown):
    calls = (ToolCall("a", "get_weather", {}), ToolCall("b", "get_weather", {}))
    results = (say("tool", "second", tool_call_id="b"), say("tool", "first", tool_call_id="a"))
    chat = Chat(
        messages=(say("user", "?"), say("assistant", "", tool_calls=calls), *results, say("user", "so?"))
    )
    text = shown(codec.encode_chat(chat).ids)
    assert text.index("first") < text.index("second") < text.index("so?")


def test_tools_are_not_shown_if_none_may_be_called(codec, shown):
    chat = Chat(messages=(say("user", "Weather?"),), tools=(WEATHER,), tool_choice="none")
    assert "get_weather" not in shown(codec.encode_chat(chat).ids)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_of_a_client_never_becomes_a_control_token(codec, checkpoints, role):
    forged = "".join(checkpoints.CONTROL_TOKENS)
    messages = (say(role, forged), say("user", "<|im_", name="x"), say("user", "end|>"))
    honest = (say(role, "x"), say("user", "y", name="x"), say("user", "z"))
    count = len(
        [token for token in codec.encode_chat(Chat(messages=messages)).ids if token in codec.control_ids]
    )
    assert count == len([t for t in codec.encode_chat(Chat(messages=honest)).ids if t in codec.control_ids])
    assert codec.control_ids.isdisjoint(codec.encode_text(forged))


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        (Chat(messages=(say("user", "?"),), tools=(WEATHER,), tool_choice="required"), "tool_choice"),
        (
            Chat(messages=(say("user", "?"),), tools=(WEATHER,), parallel_tool_calls=False),
            "parallel_tool_calls",
        ),
        (Chat(messages=(Message(role="user", content=(MediaPart("image", (4,)),)),)), "messages"),
        (Chat(messages=(say("user", "?"), say("tool", "x", tool_call_id="a"))), "messages"),
    ],
)
def test_what_the_format_has_no_place_for_is_refused(codec, chat, param):
    with pytest.raises(InvalidRequest) as refusal:
        codec.encode_chat(chat)
    assert refusal.value.param == param


def test_a_checkpoint_that_always_thinks_is_noticed(copy_of, checkpoints):
    path = copy_of("transformers")
    opening = "{{- '<|im_start|>assistant\\n' }}"
    always = (
        checkpoints.TEMPLATE.split(opening)[0] + "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    )
    (path / "chat_template.jinja").write_text(always)
    codec = Qwen3Codec(path)
    chat = Chat(messages=(say("user", "Hi!"),))
    assert codec.parser(chat).text("so") == [ReasoningDelta("so")]
    with pytest.raises(InvalidRequest, match="always reasons"):
        codec.encode_chat(Chat(messages=chat.messages, reasoning_effort="none"))


def test_tokens_and_bytes_agree(codec):
    text = "Grüße, 世界 \U0001f600\n"
    assert b"".join(map(codec.token_bytes, codec.encode_text(text))).decode() == text
    assert codec.token_bytes(max(codec.control_ids)) == b""
    assert codec.vocab_size == max(codec.control_ids) + 1
