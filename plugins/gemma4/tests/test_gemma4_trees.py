"""Random messages, written as the format writes them, come back at every cut; spoilt ones lose no text."""

import json

import pytest
from darkbloom_gemma4._parser import Gemma4Parser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_trees import TOOLS, chunkings, letters, nested, read_back, spoilt, texts, trees

from darkbloom_core.contracts import Device

WORDS = ["<turn|>", '<|"|>', "<|channel>thought\n", "call:now{}", "thought\n", "W"]

free = texts(WORDS)
values = nested(st.none() | st.booleans() | st.integers() | free)
messages = trees(free.filter(bool), values)


@pytest.fixture(scope="module")
def codec(family, demo_folder):
    config = json.loads((demo_folder / "config.json").read_text())
    return family.codec(demo_folder, family.describe(config, Device("cpu")))


def value(each, quote):
    """A value in the syntax of calls, in parts."""
    if isinstance(each, str):
        yield from (quote, each, quote)
    elif isinstance(each, dict):
        yield "{"
        for number, (name, one) in enumerate(each.items()):
            yield "," if number else ""
            yield from (name if name.isidentifier() else json.dumps(name), ":", *value(one, quote))
        yield "}"
    elif isinstance(each, list):
        yield "["
        for number, one in enumerate(each):
            yield from ("," if number else "", *value(one, quote))
        yield "]"
    else:
        yield json.dumps(each)


def written(tree, ids):
    parts = []
    if tree.thoughts:
        parts += [ids["<|channel>"], f"thought\n{tree.thoughts}\n", ids["<channel|>"]]
    parts.append(tree.says)
    for name, arguments in tree.calls:
        parts += [ids["<|tool_call>"], f"call:{name}", *value(arguments, ids['<|"|>']), ids["<tool_call|>"]]
    output = []
    for part in [*parts, ids["<turn|>"]]:  # neighbouring texts are one
        if output and isinstance(part, str) and isinstance(output[-1], str):
            output[-1] += part
        elif part != "":
            output.append(part)
    return output


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=messages)
def test_a_message_comes_back_at_every_cut(codec, tree):
    names = codec._names
    output = written(tree, {name: token for token, name in names.items()})
    for pieces in chunkings(output, lambda text: [codec.token_bytes(t) for t in codec.encode_text(text)]):
        assert read_back(Gemma4Parser(names, frozenset(TOOLS)), codec.control_ids, pieces) == tree, pieces


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_spoilt_message_loses_no_text_at_any_cut(codec, data):
    names = codec._names
    ids = {name: token for token, name in names.items()}
    output = data.draw(spoilt(messages.map(lambda tree: written(tree, ids)), sorted(names)))
    read = []
    for pieces in (
        [part if isinstance(part, int) else part.encode() for part in output],
        [each for part in output for each in ([part] if isinstance(part, int) else map(str.encode, part))],
    ):
        read.append(read_back(Gemma4Parser(names, frozenset(TOOLS)), codec.control_ids, pieces))
    assert read[0] == read[1]
    assert letters(read[0], "W") == "".join(part for part in output if isinstance(part, str)).count("W")
