"""Output becomes typed deltas, whatever the model writes and however it is cut."""

import json
import re

import pytest
from darkbloom_qwen3._parser import CALL, CALL_END, THINK, THINK_END, Qwen3Parser
from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.contracts import ContentDelta, Malformed, ReasoningDelta, ToolCallDelta

TAGS = dict(enumerate((THINK, THINK_END, CALL, CALL_END)))
OTHER = 99
TOKENS = {name: token for token, name in TAGS.items()}


def tokens(output):
    """``"<think>so</think>"`` to control tokens and characters."""
    pieces = re.split(f"({'|'.join(TOKENS)})", output)
    return [piece for part in pieces for piece in ([TOKENS[part]] if part in TOKENS else part)]


def parse(stream, *, begins_in_thought=False):
    parser = Qwen3Parser(TAGS, begins_in_thought=begins_in_thought)
    deltas = []
    for piece in stream:
        deltas += parser.control(piece) if isinstance(piece, int) else parser.text(piece)
    return fold([*deltas, *parser.finish()])


def fold(deltas):
    folded = []
    for delta in deltas:
        last = folded[-1] if folded else None
        if isinstance(delta, ContentDelta | ReasoningDelta) and type(delta) is type(last):
            folded[-1] = type(delta)(last.text + delta.text)
        elif isinstance(delta, ToolCallDelta) and delta.name is None:
            folded[-1] = ToolCallDelta(last.index, last.name, last.arguments + delta.arguments)
        else:
            folded.append(delta)
    return folded


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_reasoning_and_answer_are_told_apart_and_their_edges_trimmed():
    assert parse(tokens("<think>\nI add.\n\nTwice.\n</think>\n\nIt is 4.\n")) == [
        ReasoningDelta("I add.\n\nTwice."),
        ContentDelta("It is 4.\n"),
    ]


def test_an_empty_thought_is_nothing():
    assert parse(tokens("<think>\n\n</think>\n\nHi")) == [ContentDelta("Hi")]


def test_output_may_begin_inside_a_thought():
    assert parse(tokens("so\n</think>\n\nHi"), begins_in_thought=True) == [
        ReasoningDelta("so"),
        ContentDelta("Hi"),
    ]


def test_calls_are_counted_and_text_before_them_is_content():
    output = "Let me look.\n" + call("time", "{}") + "\n" + call("weather", '{"city": "a}\\"{"}')
    assert parse(tokens(output)) == [
        ContentDelta("Let me look."),
        ToolCallDelta(0, "time", "{}"),
        ToolCallDelta(1, "weather", '{"city": "a}\\"{"}'),
    ]


def test_arguments_are_given_out_before_the_call_is_complete():
    parser = Qwen3Parser(TAGS, begins_in_thought=False)
    parser.control(TOKENS[CALL])
    assert fold(parser.text('\n{"name": "write", "arguments": {"text": "once upon')) == [
        ToolCallDelta(0, "write", '{"text": "once upon')
    ]


def test_a_call_in_another_order_is_understood_at_its_end():
    output = '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>'
    assert parse(tokens(output)) == [ToolCallDelta(0, "weather", '{"city": "Oslo"}')]


def test_a_call_without_arguments_has_none():
    assert parse(tokens('<tool_call>{"name": "time"}</tool_call>')) == [ToolCallDelta(0, "time", "{}")]


@pytest.mark.parametrize(
    "inside", ["", "no JSON", '{"name": 3, "arguments": {}}', '{"name": "x", "arguments": [1]}', "[" * 5000]
)
def test_what_is_no_call_is_shown_as_text_and_reported(inside):
    assert parse(tokens(f"<tool_call>{inside}</tool_call>")) == [
        Malformed("broken tool call"),
        ContentDelta(f"<tool_call>{inside}</tool_call>"),
    ]


@pytest.mark.parametrize(
    ("inside", "left_over"),
    [
        ('{"name": "x", "arguments": {"a": }}', []),
        ('{"name": "x", "arguments": {"a": 1}, "more": 2}', [ContentDelta(', "more": 2}')]),
        ('{"name": "x", "arguments": {"a": 1}', []),
    ],
)
def test_a_call_that_breaks_after_its_name_is_reported(inside, left_over):
    (given_out, *rest) = parse(tokens(f"<tool_call>{inside}</tool_call>"))
    assert given_out.name == "x"
    assert rest == [Malformed("broken tool call"), *left_over]


def test_a_call_cut_off_by_the_end_keeps_what_there_was():
    assert parse(tokens('<tool_call>{"name": "x", "arguments": {"a')) == [
        ToolCallDelta(0, "x", '{"a'),
        Malformed("broken tool call"),
    ]
    assert parse(tokens('<tool_call>{"na')) == [
        Malformed("broken tool call"),
        ContentDelta('<tool_call>{"na'),
    ]


@pytest.mark.parametrize("output", ["</think>", "<think><think>", "</tool_call>", "a</think>b"])
def test_misplaced_control_tokens_are_reported(output):
    assert Malformed("misplaced control token") in parse(tokens(output))


def test_text_around_an_unknown_control_token_is_kept():
    assert parse(["a", OTHER, "b"]) == [
        ContentDelta("a"),
        Malformed("misplaced control token"),
        ContentDelta("b"),
    ]


FRAGMENTS = st.sampled_from(
    [
        *TAGS,
        OTHER,
        "\n",
        "\n\n",
        "{",
        "}",
        '"',
        "\\",
        "text ",
        '{"name": "f", "arguments": ',
        '{"a": "}"}',
        "}\n",
    ]
)


@given(st.lists(FRAGMENTS, max_size=30), st.booleans(), st.data())
def test_any_output_in_any_cut_gives_the_same_and_loses_no_text(stream, begins_in_thought, data):
    characters = [piece for part in stream for piece in ([part] if isinstance(part, int) else part)]
    pieces = []
    for piece in characters:
        join = pieces and isinstance(piece, str) and isinstance(pieces[-1], str) and data.draw(st.booleans())
        pieces[-1:] = [pieces[-1] + piece] if join else [*pieces[-1:], piece]
    folded = parse(characters, begins_in_thought=begins_in_thought)
    assert parse(pieces, begins_in_thought=begins_in_thought) == folded

    written = "".join(piece for piece in characters if isinstance(piece, str))
    shown = "".join(
        json.dumps(delta.name) + delta.arguments
        if isinstance(delta, ToolCallDelta)
        else getattr(delta, "text", "")
        for delta in folded
    )
    assert written.count("text") == shown.count("text")
