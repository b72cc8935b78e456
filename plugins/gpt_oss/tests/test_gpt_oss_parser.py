"""Harmony output becomes typed deltas, whatever the model writes and however it is cut."""

import pytest
from darkbloom_gpt_oss._parser import CONTROL_NAMES, HarmonyParser
from hypothesis import given, settings
from hypothesis import strategies as st

from darkbloom_core.contracts import ContentDelta, Malformed, ReasoningDelta, ToolCallDelta

NAMES = dict(enumerate([*CONTROL_NAMES, "<|startoftext|>"]))
IDS = {name: token for token, name in NAMES.items()}
TOOLS = frozenset({"get_weather"})


def pieces(output):
    """``"<|channel|>final"`` to tokens and texts, in order."""
    import re

    return [IDS.get(piece, piece) for piece in re.split(r"(<\|\w+\|>)", output) if piece]


def parse(stream, tools=TOOLS):
    """The fold of deltas: neighbours of one kind joined."""
    parser = HarmonyParser(NAMES, tools)
    deltas = []
    for piece in stream:
        deltas += parser.control(piece) if isinstance(piece, int) else parser.text(piece)
    deltas += parser.finish()
    return fold(deltas)


def fold(deltas):
    folded = []
    for delta in deltas:
        last = folded[-1] if folded else None
        if isinstance(delta, ContentDelta | ReasoningDelta) and type(last) is type(delta):
            folded[-1] = type(delta)(last.text + delta.text)
        elif isinstance(delta, ToolCallDelta) and isinstance(last, ToolCallDelta) and delta.name is None:
            folded[-1] = ToolCallDelta(last.index, last.name, last.arguments + delta.arguments)
        else:
            folded.append(delta)
    return folded


def text_of(folded, kind):
    return "".join(delta.text for delta in folded if isinstance(delta, kind))


def test_analysis_is_reasoning_and_final_is_content():
    folded = parse(
        pieces(
            "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
        )
    )
    assert folded == [ReasoningDelta("Sum."), ContentDelta("4")]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        " to=functions.get_weather<|channel|>commentary json",
        "<|channel|>commentary to=functions.get_weather",
        "<|channel|>analysis to=functions.get_weather code",
        "<|channel|>commentary to=get_weather <|constrain|>json",
        "assistant to=functions.get_weather<|channel|>commentary<|constrain|>json",
        "<|channel|>analysis<|message|><|end|><|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json",
    ],
)
def test_a_recipient_in_the_role_or_the_channel_makes_a_tool_call(header):
    folded = parse(pieces(f'{header}<|message|>{{"city": "Oslo"}}<|call|>'))
    assert folded == [ToolCallDelta(0, "get_weather", '{"city": "Oslo"}')]


def test_several_calls_are_counted_and_a_call_without_arguments_has_its_name():
    call = "<|channel|>commentary to=functions.get_weather<|message|>{}"
    folded = parse(pieces(f"{call}<|end|><|start|>assistant{call}<|call|>"))
    assert [(delta.index, delta.arguments) for delta in folded] == [(0, "{}"), (1, "{}")]
    (named, *_) = parse(pieces("<|channel|>commentary to=functions.get_weather<|message|>"))
    assert named == ToolCallDelta(0, "get_weather")


def test_commentary_without_a_recipient_is_shown_before_the_answer():
    folded = parse(
        pieces(
            "<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant<|channel|>final<|message|>Done."
        )
    )
    assert folded == [ContentDelta("Plan.\nDone.")]


@pytest.mark.parametrize(
    ("output", "shown", "reason"),
    [
        ("Hello there<|return|>", "Hello there", "text without a message header"),
        ("t", "t", "text without a message header"),
        ("<|message|>Hi", "Hi", "message without a channel"),
        ("<|channel|>thoughts<|message|>Hi", "thoughts\nHi", "text without a message header"),
        ("<|channel|>final answer<|message|>Hi", "final answer\nHi", "text without a message header"),
        ("<|channel|>anal<|message|>Hi", "anal\nHi", "unknown message header"),
        ("<|channel|>final is 5<|return|>", "final is 5", "text without a message header"),
        ("<|channel|>fin<|return|>", "fin", "message without a body"),
        ("<|channel|>final<|message|>a<|end|>b", "a\nb", "text between messages"),
        ("<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b", "a\nb", "message without an end"),
        ("<|channel|>final<|message|>a<|channel|>final<|message|>b", "a\nb", "message without a start"),
        ("<|channel|>final<|message|>a<|end|><|channel|>final<|message|>b", "a\nb", "message without a start"),
        ("<|channel|>final<|message|>a<|message|>b", "ab", "unexpected control token"),
        ("<|channel|>final<|message|>a<|constrain|>b", "ab", "unexpected control token"),
        ("<|channel|>final<|message|>a<|startoftext|>b", "ab", "unexpected control token"),
        ("<|channel|>final<|message|>a<|end|><|end|>", "a", "unexpected control token"),
        ("<|channel|>final<|message|>a<|end|><|start|>user<|message|>b", "a\nuser\nb", "text without a message header"),
        ("<|channel|>commentary to=python<|message|>1+1", "1+1", "call of a tool that was not offered"),
        ("<|channel|>commentary to=functions.<|message|>1", "1", "call of a tool that was not offered"),
        ("<|channel|>commentary to=web-browsing<|message|>{}<|call|>", "{}", "call of a tool that was not offered"),
        ("<|channel|>\u2013\u2013commentary<|message|>Hi<|end|>", "\u2013\u2013commentary\nHi", "text without a message header"),
        ("<|channel|>final<|channel|>final<|message|>a", "a", "repeated header section"),
        ("<|start|>assistant<|start|>assistant<|channel|>final<|message|>a", "a", "message without a body"),
    ],
)  # fmt: skip
def test_malformed_output_is_shown_and_its_fault_named(output, shown, reason):
    folded = parse(pieces(output))
    assert text_of(folded, ContentDelta) == shown
    assert reason in [delta.reason for delta in folded if isinstance(delta, Malformed)]


def test_thoughts_under_a_spoilt_header_stay_thoughts():
    folded = parse(pieces("<|channel|>analysis quickly<|message|>Hm.<|end|>"))
    assert folded == [
        Malformed("text without a message header"),
        ContentDelta("analysis quickly"),
        ReasoningDelta("Hm."),
    ]


def test_a_recipient_without_end_is_shown_and_not_held_for_ever():
    parser = HarmonyParser(NAMES, TOOLS)
    assert list(parser.text("to=" + "x" * 500)) == []
    assert ContentDelta("to=" + "x" * 600) in parser.text("x" * 100)


def test_arguments_that_are_not_json_are_named_after_the_call():
    folded = parse(pieces("<|channel|>commentary to=functions.get_weather<|message|>{city<|call|>"))
    assert folded == [ToolCallDelta(0, "get_weather", "{city"), Malformed("tool arguments are not JSON")]


def test_the_name_of_a_function_may_have_a_hyphen_and_a_dot():
    for name in ("web-browsing", "web.open"):
        call = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}<|call|>"
        assert parse(pieces(call), frozenset({name})) == [ToolCallDelta(0, name, "{}")]


def test_two_outputs_share_nothing():
    one, other = HarmonyParser(NAMES, TOOLS), HarmonyParser(NAMES, TOOLS)
    call = pieces('<|channel|>commentary to=functions.get_weather<|message|>{"city": "Oslo"}')
    said = pieces("<|channel|>final<|message|>Hello there, you.")
    deltas = {id(one): [], id(other): []}
    for pair in zip(call, [*said, *[""] * len(call)], strict=False):
        for parser, piece in zip((one, other), pair, strict=True):
            deltas[id(parser)] += parser.control(piece) if isinstance(piece, int) else parser.text(piece)
    assert fold(deltas[id(one)]) == [ToolCallDelta(0, "get_weather", '{"city": "Oslo"}')]
    assert fold(deltas[id(other)]) == [ContentDelta("Hello there, you.")]


def test_without_tools_a_call_is_shown_as_text():
    folded = parse(
        pieces('<|channel|>commentary to=functions.get_weather<|message|>{"a": 1}<|call|>'), frozenset()
    )
    assert folded == [Malformed("call of a tool that was not offered"), ContentDelta('{"a": 1}')]


@pytest.mark.parametrize(
    "output",
    [
        "",
        "<|return|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>a<|end|>\n<|start|>assistant",
        "<|channel|>fin",
        " to=functions.get_",
        "<|channel|>final<|message|>done<|end|><|return|>",
        '<|channel|>commentary to=functions.get_weather<|message|>{"ci',
        "<|channel|>final<|message|>to=assistant",
        "<|channel|>commentary to=user<|message|>Hi",
    ],
)
def test_an_output_cut_off_or_a_little_unusual_is_not_malformed(output):
    assert not [delta for delta in parse(pieces(output)) if isinstance(delta, Malformed)]


words = st.sampled_from(
    ["assistant", "analysis", "final", "commentary", "json", " to=functions.get_weather", "to=x", " ", "\n",
     "fin", "a", "user", '{"city": 1}', "é", "日", "hello world", "<", "t"]
)  # fmt: skip
streams = st.lists(st.one_of(st.sampled_from(sorted(NAMES)), words), max_size=14)


def test_words_of_a_section_that_came_again_are_shown_where_they_came():
    stream = pieces("<|channel|>commentary <|constrain|>json<|channel|>{}<|call|>")
    for cut in (
        stream,
        [each for piece in stream for each in ([piece] if isinstance(piece, int) else piece)],
    ):
        assert text_of(parse(cut), ContentDelta) == "commentary json {}"


@settings(max_examples=100, deadline=None)
@given(stream=streams, tools=st.sampled_from([TOOLS, frozenset()]))
def test_any_cut_gives_the_same_fold(stream, tools):
    characters = [each for piece in stream for each in ([piece] if isinstance(piece, int) else list(piece))]
    joined = []
    for piece in stream:
        if joined and isinstance(piece, str) and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    assert parse(characters, tools) == parse(stream, tools) == parse(joined, tools)


@settings(max_examples=100, deadline=None)
@given(stream=st.lists(st.one_of(st.sampled_from(sorted(NAMES)), words, st.just(" W! ")), max_size=14))
def test_no_text_is_lost(stream):
    folded = parse(stream)
    shown = text_of(folded, ContentDelta) + text_of(folded, ReasoningDelta)
    shown += "".join(delta.arguments for delta in folded if isinstance(delta, ToolCallDelta))
    assert shown.count("W!") == stream.count(" W! ")
