"""What harmony outputs must be: calls that are required, answers in a format; thoughts are free."""

import pytest
from fits import Fits

from darkbloom_core.contracts import AnswerFormat, Chat, JsonText, Message, RegexText, TextPart, Tool
from darkbloom_core.errors import InvalidRequest

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool(name="get_weather", parameters=CITY, strict=True)
LOOSE = Tool(name="now", parameters={"type": "object"})
JSON = AnswerFormat(text=JsonText(CITY, "schema"), name="place", description="A place.")

THOUGHT = "<|channel|>analysis<|message|>Hm: {<|end|><|start|>assistant"
REMARK = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
CALL_IN_ROLE = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
WRONG_CALL = CALL.replace("city", "town")
NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
FINAL = "<|channel|>final<|message|>It is 4.<|return|>"
FINAL_JSON = '<|channel|>final<|message|>{"city": "Oslo"}<|return|>'
TYPED_JSON = '<|channel|>final <|constrain|>json<|message|>{"city": "Oslo"}<|return|>'


@pytest.fixture(scope="module")
def codec(family, demo_folder, load):
    return family.codec(demo_folder, load(demo_folder).description)


@pytest.fixture(scope="module")
def fits(codec):
    return Fits(codec, {name: token for token, name in codec._names.items()})


def chat(**fields):
    return Chat(messages=(Message(role="user", content=(TextPart("Hi!"),)),), **fields)


REQUIRED = chat(tools=(WEATHER, LOOSE), tool_choice="required")
NAMED = chat(tools=(WEATHER, LOOSE), tool_choice="required", named_tool="now")
STRICT = chat(tools=(WEATHER, LOOSE))
ANSWER = chat(answer=JSON)
BOTH = chat(answer=JSON, tools=(LOOSE,))


@pytest.mark.parametrize(
    ("chat", "good", "bad"),
    [
        (
            REQUIRED,
            [CALL, CALL_IN_ROLE, NOW, THOUGHT + CALL, THOUGHT + REMARK + NOW],
            [FINAL, WRONG_CALL, THOUGHT],
        ),
        (NAMED, [NOW, THOUGHT + NOW], [CALL, FINAL]),
        (STRICT, [CALL, NOW, FINAL, THOUGHT + FINAL], [WRONG_CALL]),
        (ANSWER, [FINAL_JSON, TYPED_JSON, THOUGHT + FINAL_JSON], [FINAL, CALL, FINAL_JSON[:-12]]),
        (BOTH, [FINAL_JSON, THOUGHT + NOW], [FINAL, CALL]),
    ],
    ids=["required", "named", "strict", "answer", "answer or call"],
)
def test_outputs_that_answer_fit_and_others_do_not(fits, chat, good, bad):
    assert [fits(chat, output) for output in good] == [True] * len(good)
    assert [fits(chat, output) for output in bad] == [False] * len(bad)


@pytest.mark.parametrize("asked", [chat(), chat(tools=(LOOSE,)), chat(tools=(WEATHER,), tool_choice="none")])
def test_nothing_is_constrained_that_need_not_be(codec, asked):
    assert codec.grammar(asked) is None


def test_a_call_cannot_be_required_without_a_tool(codec):
    with pytest.raises(InvalidRequest) as caught:
        codec.grammar(chat(tool_choice="required"))
    assert caught.value.param == "tool_choice"


def test_the_model_is_told_the_name_and_the_schema(codec):
    text = b"".join(map(codec.token_bytes, codec.encode_chat(ANSWER).ids)).decode()
    assert '# Response Formats\n\n## place\n\n// A place.\n{"type":"object"' in text
    pattern = chat(answer=AnswerFormat(text=RegexText("a+", "x"), name="x"))
    assert codec.encode_chat(pattern) == codec.encode_chat(chat())
