"""Random messages of a model, and reading them back out of a family's tokens however those are cut.

A family's test says how one is written: control tokens and the UTF-8 of the text between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from darkbloom_core.contracts import ContentDelta, OutputParser, ReasoningDelta, ToolCallDelta
from darkbloom_core.engine._text import TextPipeline

FIRST_PIECE = 2**20
"""Pieces of text are tokens from this id on."""

TOOLS = ("get_weather", "now", "a.b-c_1")

Written = list[int | str]
"""An output: control tokens, and text."""


@dataclass(frozen=True)
class Tree:
    """``calls`` are names and arguments."""

    thoughts: str
    says: str
    calls: tuple[tuple[str, Any], ...]


def trees(texts: st.SearchStrategy[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Tree]:
    """Messages of such ``texts``, whose calls have arguments of such ``values``."""
    arguments = st.dictionaries(st.sampled_from(["city", "b_2", "two words"]), values, max_size=3)
    calls = st.lists(st.tuples(st.sampled_from(TOOLS), arguments), max_size=2).map(tuple)
    return st.builds(Tree, texts | st.just(""), texts | st.just(""), calls)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """JSON values."""
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=5,
    )


def texts(words: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts of all kinds of characters and of ``words``, which a format may mistake for its own."""
    characters = st.text(st.sampled_from(' aé日😀\n\t"\\{}[]:,<|>'), max_size=6)
    return st.lists(characters | st.sampled_from(words), max_size=4).map("".join)


def read_back(parser: OutputParser, controls: frozenset[int], output: Iterable[int | bytes]) -> Tree:
    """What the parser, behind the engine's own decoding of bytes, makes of ``output``, a piece for each token."""
    pieces: dict[int, bytes] = {}
    pipeline = TextPipeline(pieces.__getitem__, controls, parser, ())
    deltas = []
    for piece in output:
        token = piece if isinstance(piece, int) else FIRST_PIECE + len(pieces)
        if isinstance(piece, bytes):
            pieces[token] = piece
        deltas += pipeline.push(token)
    deltas += pipeline.finish()
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            call = calls.setdefault(delta.index, [delta.name or "", ""])
            call[1] += delta.arguments
    return Tree(
        "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)),
        tuple((name, read_json(arguments)) for name, arguments in calls.values()),
    )


def read_json(arguments: str) -> Any:
    """Parsed, or the text itself where it is no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def chunkings(output: Written, tokens: Callable[[str], list[bytes]]) -> Iterator[list[int | bytes]]:
    """``output`` cut at every byte, nowhere, as a tokenizer cuts it, and in two at every place."""
    yield [each for part in output for each in ([part] if isinstance(part, int) else single_bytes(part))]
    whole = [part if isinstance(part, int) else part.encode() for part in output]
    yield whole
    yield [each for part in output for each in ([part] if isinstance(part, int) else tokens(part))]
    for index, part in enumerate(whole):
        for place in range(1, 0 if isinstance(part, int) else len(part)):
            yield [*whole[:index], part[:place], part[place:], *whole[index + 1 :]]


def single_bytes(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


@st.composite
def spoilt(draw, outputs: st.SearchStrategy[Written], controls: Sequence[int]) -> Written:
    """An output with parts left out, repeated, in another order or in the place of others."""
    output = list(draw(outputs))
    for _ in range(draw(st.integers(1, 4))):
        if not output:
            break
        place, other = (draw(st.integers(0, len(output) - 1)) for _ in range(2))
        match draw(st.sampled_from(["drop", "repeat", "swap", "control", "cut"])):
            case "drop":
                del output[place]
            case "repeat":
                output.insert(other, output[place])
            case "swap":
                output[place], output[other] = output[other], output[place]
            case "control":
                output.insert(place, draw(st.sampled_from(controls)))
            case _:
                if isinstance(output[place], str):
                    output[place] = output[place][: len(output[place]) // 2]
                del output[place + 1 :]
    return output


def letters(tree: Tree, letter: str) -> int:
    """How often ``letter`` is shown anywhere."""
    calls = "".join(f"{name}{json.dumps(arguments)}" for name, arguments in tree.calls)
    return (tree.thoughts + tree.says + calls).count(letter)
