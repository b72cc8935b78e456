"""From tokens to text: no half characters, no lost text, stop strings across any cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.contracts import ContentDelta, ReasoningDelta, ToolCallDelta
from darkbloom_core.engine import PlainParser
from darkbloom_core.engine._text import StopMatcher, TextPipeline


def pipeline(
    pieces: list[bytes], stops: tuple[str, ...] = (), parser=None, control=frozenset()
) -> TextPipeline:
    """A pipeline whose token ``n`` stands for ``pieces[n]``."""
    return TextPipeline(pieces.__getitem__, control, parser or PlainParser(), stops)


def run(pipe: TextPipeline, count: int) -> str:
    out = []
    for token in range(count):
        out += pipe.push(token)
        if pipe.stopped:
            return "".join(delta.text for delta in out)
    out += pipe.finish()
    return "".join(delta.text for delta in out)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(text=st.text(max_size=40), places=st.lists(st.integers(0, 1000), max_size=20))
def test_any_cut_of_the_bytes_gives_the_same_text_and_never_half_a_character(text, places):
    pieces = cut(text.encode(), places)
    pipe = pipeline(pieces)
    for token in range(len(pieces)):
        for delta in pipe.push(token):
            assert "\ufffd" not in delta.text or "\ufffd" in text
    assert run(pipeline(pieces), len(pieces)) == text


def test_plain_text_is_emitted_at_once_and_an_emoji_whole():
    family = "👩\u200d👩\u200d👧".encode()
    pieces = [b"hi", *(bytes([byte]) for byte in family), "ď".encode()[:1], "ď".encode()[1:], b" "]
    pipe = pipeline(pieces)
    assert pipe.push(0) == (ContentDelta("hi"),)
    assert run(pipeline(pieces), len(pieces)) == "hi" + family.decode() + "ď "


def test_bytes_that_are_truly_invalid_become_one_replacement_character():
    assert run(pipeline([b"a", b"\xf0\x9f", b" b"]), 3) == "a\ufffd b"


def test_half_a_character_at_the_end_is_dropped():
    assert run(pipeline([b"ab", "😀".encode()[:2]]), 2) == "ab"


def first_stop(text: str, stops: tuple[str, ...]) -> str:
    """Character by character: as soon as some stop string is complete, the text before the longest such."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)]
    return text


@given(
    text=st.text("ab ", max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    places=st.lists(st.integers(0, 100), max_size=12),
)
def test_the_text_ends_before_the_stop_string_that_is_complete_first_however_it_is_cut(text, stops, places):
    pieces = cut(text.encode(), places)
    pipe, expected = pipeline(pieces, stops), first_stop(text, stops)
    assert run(pipe, len(pieces)) == expected
    assert pipe.stopped == (expected != text)
    assert pipe.stop_string is None or text.startswith(expected + pipe.stop_string)


def test_nothing_of_a_stop_string_leaks_and_what_was_held_back_comes_at_the_end():
    matcher = StopMatcher(("own fox",))
    assert matcher.push("The quick br") == "The quick br"
    assert matcher.push("own f") == ""
    assert matcher.push("og") == "own fog"
    assert matcher.push(" own ") == " "
    assert matcher.flush() == "own "
    assert not matcher.matched


class Channels:
    """A parser whose control token 90 begins reasoning, 91 content, 92 a tool call."""

    def __init__(self):
        self.channel = 91

    def control(self, token):
        self.channel = token
        return (ToolCallDelta(0, "f"),) if token == 92 else ()

    def text(self, text):
        if self.channel == 92:
            return (ToolCallDelta(0, None, text),)
        return (ReasoningDelta(text) if self.channel == 90 else ContentDelta(text),)

    def finish(self):
        return ()


def test_stop_strings_bind_in_the_content_alone_and_keep_the_order():
    pieces = {1: b"stop", 2: b"st", 3: b"yes"}
    pipe = TextPipeline(pieces.__getitem__, frozenset({90, 91, 92}), Channels(), ("stop",))
    out = []
    for token in (90, 1, 91, 2, 92, 1, 91, 3, 1, 3):
        if pipe.stopped:
            break
        out += pipe.push(token)
    assert out == [
        ReasoningDelta("stop"),
        ContentDelta("st"),
        ToolCallDelta(0, "f"),
        ToolCallDelta(0, None, "stop"),
        ContentDelta("ye"),
        ContentDelta("s"),
    ]
    assert pipe.stopped


@given(st.lists(st.sampled_from([1, 2, 90, 91, 92]), max_size=30))
def test_there_are_never_more_reasoning_tokens_than_tokens(tokens):
    pipe = TextPipeline({1: b"think", 2: b"say"}.__getitem__, frozenset({90, 91, 92}), Channels(), ())
    for token in tokens:
        pipe.push(token)
    assert 0 <= pipe.reasoning_tokens <= len(tokens)


def test_reasoning_tokens_are_counted():
    pieces = {1: b"think", 2: b"say"}
    pipe = TextPipeline(pieces.__getitem__, frozenset({90, 91}), Channels(), ())
    for token in (90, 1, 1, 91, 2):
        pipe.push(token)
    assert 2 <= pipe.reasoning_tokens <= 3
