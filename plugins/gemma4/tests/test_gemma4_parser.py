"""Output to deltas: whatever a model writes, however it is cut."""

import json
from functools import reduce

import pytest
from darkbloom_gemma4._parser import Gemma4Parser
from darkbloom_gemma4._tokens import CONTROL_NAMES
from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.contracts import ContentDelta, Malformed, ReasoningDelta, ToolCallDelta

IDS = {name: number for number, name in enumerate(sorted(CONTROL_NAMES), start=1)}
NAMES = {number: name for name, number in IDS.items()}
UNKNOWN = 99


def events(output):
    """``output`` as control tokens and the texts between them."""
    found, rest = [], output
    while rest:
        place, name = min(
            ((rest.find(name), name) for name in IDS if name in rest), default=(len(rest), None)
        )
        if place:
            found.append(rest[:place])
        if name is not None:
            found.append(IDS[name])
            place += len(name)
        rest = rest[place:]
    return found


def add(folded, delta):
    last = folded[-1] if folded else None
    if type(last) is type(delta) and isinstance(delta, ContentDelta | ReasoningDelta):
        return [*folded[:-1], type(delta)(last.text + delta.text)]
    return [*folded, delta]


def fold(parts, *, tools=("f", "g")):
    parser = Gemma4Parser(NAMES, frozenset(tools))
    deltas = []
    for part in parts:
        deltas += parser.text(part) if isinstance(part, str) else parser.control(part)
    deltas += parser.finish()
    return reduce(add, deltas, [])


def parse(output, **options):
    return fold(events(output), **options)


CALL = '<|tool_call>call:f{city:<|"|>Paris<|"|>}<tool_call|>'
CALLED = ToolCallDelta(0, name="f", arguments='{"city": "Paris"}')
THOUGHT = "<|channel>thought\nLet me\nsee.\n<channel|>"

GOOD = {
    "text": ("It is 4.<turn|>", [ContentDelta("It is 4.")]),
    "line breaks of text": ("a\n\nb\n<turn|>", [ContentDelta("a\n\nb\n")]),
    "thinking": (f"{THOUGHT}It is 4.<turn|>", [ReasoningDelta("Let me\nsee."), ContentDelta("It is 4.")]),
    "no thought": ("<|channel>thought\n<channel|>It is 4.<turn|>", [ContentDelta("It is 4.")]),
    "no thought, no line break": ("<|channel>thought<channel|>4<turn|>", [ContentDelta("4")]),
    "call": (f"{CALL}<|tool_response>", [CALLED]),
    "call, then a bare end of turn": (f"{CALL}<turn|>", [CALLED]),
    "thinking, then a call": (f"{THOUGHT}{CALL}<|tool_response>", [ReasoningDelta("Let me\nsee."), CALLED]),
    "a call ends thinking": (
        f"<|channel>thought\nHm.\n{CALL}<|tool_response>",
        [ReasoningDelta("Hm."), CALLED],
    ),
    "text around a call": (
        f"One moment.{CALL}Done.<turn|>",
        [ContentDelta("One moment."), CALLED, ContentDelta("Done.")],
    ),
    "two calls": (
        f"{CALL}<|tool_call>call:g{{n:1}}<tool_call|><|tool_response>",
        [CALLED, ToolCallDelta(1, name="g", arguments='{"n": 1}')],
    ),
    "two calls between one pair of tokens": (
        '<|tool_call>call:f{city:<|"|>Paris<|"|>}call:g{n:1}<tool_call|>',
        [CALLED, ToolCallDelta(1, name="g", arguments='{"n": 1}')],
    ),
    "a call without its end": (CALL.removesuffix("<tool_call|>") + "<turn|>", [CALLED]),
    "a call cut off after its brace": (CALL.removesuffix("<tool_call|>"), [CALLED]),
    "cut off in thinking": ("<|channel>thought\nLet", [ReasoningDelta("Let")]),
    "cut off at a line break": ("<|channel>thought\nLet\n", [ReasoningDelta("Let\n")]),
    "cut off in the channel's name": ("<|channel>thou", []),
    "nothing": ("<turn|>", []),
}
BROKEN = {
    "parentheses": (
        f'<|tool_call>call:f(command:<|"|>ls<|"|>)<tool_call|>{CALL}<turn|>',
        [Malformed("tool call that cannot be read"), ContentDelta('call:f(command:"ls")'), CALLED],
    ),
    "cut off inside a call": (
        '<|tool_call>call:f{city:<|"|>Par',
        [Malformed("tool call without an end"), ContentDelta('call:f{city:"Par')],
    ),
    "a call inside a call": (
        f"<|tool_call>call:g{{n:{CALL}<turn|>",
        [Malformed("tool call without an end"), ContentDelta("call:g{n:"), CALLED],
    ),
    "text after a call, before its end": (
        "<|tool_call>call:g{n:1} and more<tool_call|>",
        [
            ToolCallDelta(0, name="g", arguments='{"n": 1}'),
            Malformed("tool call that cannot be read"),
            ContentDelta(" and more"),
        ],
    ),
    "nothing called": ("<|tool_call><tool_call|>Hm.", [Malformed("empty tool call"), ContentDelta("Hm.")]),
    "not offered": (
        '<|tool_call>call:rm{path:<|"|>/<|"|>}<tool_call|>',
        [Malformed("call of a tool that was not offered"), ContentDelta('call:rm{"path": "/"}')],
    ),
    "an unknown channel": (
        "<|channel>final\nIt is 4.<channel|>So.",
        [
            Malformed("unknown channel"),
            ContentDelta("final\nIt is 4."),
            Malformed("unexpected control token"),
            ContentDelta("So."),
        ],
    ),
    "a channel without a line break": (
        "<|channel>thought I should count on all my fingers\nfirst.<channel|>4",
        [
            Malformed("channel without a line break"),
            ReasoningDelta(" I should count on all my fingers\nfirst."),
            ContentDelta("4"),
        ],
    ),
    "a channel inside a channel": (
        "<|channel>thought\na<|channel>thought\nb\n<channel|>4",
        [ReasoningDelta("a"), Malformed("channel inside a channel"), ReasoningDelta("b"), ContentDelta("4")],
    ),
    "a channel without an end": (
        "<|channel>thought\na<turn|>",
        [ReasoningDelta("a"), Malformed("channel without an end")],
    ),
    "ends of nothing": (
        "a<channel|>b<tool_call|>c",
        [
            ContentDelta("a"),
            Malformed("unexpected control token"),
            ContentDelta("b"),
            Malformed("unexpected control token"),
            ContentDelta("c"),
        ],
    ),
    "a quote in text": (
        'say <|"|>x',
        [ContentDelta("say "), Malformed("quote outside a tool call"), ContentDelta('"x')],
    ),
    "a turn inside a turn": (
        "a<|turn>user\nb",
        [ContentDelta("a"), Malformed("unexpected control token"), ContentDelta("user\nb")],
    ),
}
EVERY = {**GOOD, **BROKEN}


@pytest.mark.parametrize("name", EVERY)
def test_what_an_output_means(name):
    output, expected = EVERY[name]
    assert parse(output) == expected


@pytest.mark.parametrize("name", GOOD)
def test_nothing_good_is_called_malformed(name):
    assert not any(isinstance(delta, Malformed) for delta in parse(GOOD[name][0]))


@pytest.mark.parametrize("name", EVERY)
def test_every_cut_of_an_output_means_the_same(name):
    """Each text as one piece, in two at every place, and character by character."""
    output, expected = EVERY[name]
    parts = events(output)
    assert (
        fold([piece for part in parts for piece in (part if isinstance(part, str) else [part])]) == expected
    )
    for index, part in enumerate(parts):
        for cut in range(1, len(part) if isinstance(part, str) else 0):
            assert fold([*parts[:index], part[:cut], part[cut:], *parts[index + 1 :]]) == expected


def test_deltas_come_as_soon_as_they_can():
    parser = Gemma4Parser(NAMES, frozenset())
    assert parser.text("Hel") == [ContentDelta("Hel")]
    parser = Gemma4Parser(NAMES, frozenset())
    parser.control(IDS["<|channel>"])
    assert parser.text("thought\nLet me") == [ReasoningDelta("Let me")]


def test_two_outputs_share_nothing():
    one, other = (Gemma4Parser(NAMES, frozenset({"f", "g"})) for _ in range(2))
    one.control(IDS["<|tool_call>"])
    assert other.text("hi") == [ContentDelta("hi")]
    one.text("call:g{n:1}")
    other.control(IDS["<|tool_call>"])
    other.text("call:g{n:2}")
    assert one.control(IDS["<tool_call|>"]) == [ToolCallDelta(0, name="g", arguments='{"n": 1}')]
    assert other.control(IDS["<tool_call|>"]) == [ToolCallDelta(0, name="g", arguments='{"n": 2}')]


def test_control_tokens_of_other_kinds_are_no_text():
    assert fold(["a", UNKNOWN, "b"]) == [
        ContentDelta("a"),
        Malformed("unexpected control token"),
        ContentDelta("b"),
    ]


texts = st.sampled_from(
    [
        *("call:x{", "call:", "x:", "y", "z", "thought", "thought\n", "thoughtx", "\n", "{", "}", "[", "]"),
        *(",", ":", '"', '"y"', "(", " ", "1", "true", "z" * 40, "\\", "\ue000"),
    ]
)
outputs = st.lists(st.one_of(texts, st.sampled_from(sorted(NAMES)), st.just(UNKNOWN)), max_size=30)


def shown(deltas):
    for delta in deltas:
        if isinstance(delta, ContentDelta | ReasoningDelta):
            yield delta.text
        elif isinstance(delta, ToolCallDelta):
            yield f"{delta.name}{delta.arguments}"


@given(outputs, st.data())
def test_any_cut_of_anything_means_the_same_and_loses_no_text(parts, data):
    whole = []
    for part in parts:  # neighbouring texts are one text
        if whole and isinstance(part, str) and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    deltas = fold(whole, tools=("x",))
    assert fold(parts, tools=("x",)) == deltas
    characters = [piece for part in whole for piece in (part if isinstance(part, str) else [part])]
    assert fold(characters, tools=("x",)) == deltas
    written = "".join(part for part in parts if isinstance(part, str))
    read = "".join(shown(deltas))
    for letter in "xyz1":  # no word of the format has one of these
        assert read.count(letter) == written.count(letter)
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert [call.index for call in calls] == list(range(len(calls)))
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text().filter(lambda text: '"' not in text)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text("abc", min_size=1), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_arguments_come_back_as_they_were_written(value):
    def write(each):
        """Pieces as a model writes them; None for the quote token."""
        if isinstance(each, str):
            yield from (None, each, None)
        elif isinstance(each, dict):
            yield "{"
            for key, one in each.items():
                yield from (f"{key}:", *write(one), ",")
            yield "}"
        elif isinstance(each, list):
            yield "["
            for one in each:
                yield from (*write(one), ",")
            yield "]"
        else:
            yield json.dumps(each)

    quote = IDS['<|"|>']
    parts = [quote if part is None else part for part in ["call:f{v:", *write(value), "}"] if part != ""]
    (call,) = fold([IDS["<|tool_call>"], *parts, IDS["<tool_call|>"]])
    assert json.loads(call.arguments) == {"v": value}
