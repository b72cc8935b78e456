"""Random messages, written as harmony writes them, come back at every cut; spoilt ones lose no text."""

import json

import pytest
from darkbloom_gpt_oss._parser import HarmonyParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_trees import TOOLS, Tree, chunkings, letters, nested, read_back, spoilt, texts, trees

from darkbloom_core.contracts import Device

WORDS = ["<|end|>", "<|channel|>", "assistant", "final", "to=functions.now ", "W"]

free = texts(WORDS)
values = nested(st.none() | st.booleans() | st.integers() | free)
messages = trees(free.filter(bool), values)


@pytest.fixture(scope="module")
def codec(family, demo_folder):
    config = json.loads((demo_folder / "config.json").read_text())
    return family.codec(demo_folder, family.describe(config, Device("cpu")))


def written(tree, ids, placement="channel"):
    """A call's recipient stands in the channel or in the role."""
    output = []

    def message(role, header, body, end):
        if output:
            output.extend([ids["<|start|>"], f"assistant{role}"])
        elif role:
            output.append(role)
        output.extend([ids["<|channel|>"], *header, ids["<|message|>"], *([body] if body else []), ids[end]])

    if tree.thoughts:
        message("", ["analysis"], tree.thoughts, "<|end|>")
    if tree.says and tree.calls:
        message("", ["commentary"], tree.says, "<|end|>")
    for number, (name, arguments) in enumerate(tree.calls, 1):
        to = f" to=functions.{name}"
        role, channel = (to, "") if placement == "role" else ("", to)
        header = [f"commentary{channel} ", ids["<|constrain|>"], "json"]
        end = "<|call|>" if number == len(tree.calls) else "<|end|>"
        message(role, header, json.dumps(arguments, ensure_ascii=False), end)
    if not tree.calls:
        message("", ["final"], tree.says, "<|return|>")
    return output


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=messages, placement=st.sampled_from(["channel", "role"]))
def test_a_message_comes_back_at_every_cut(codec, tree, placement):
    names = codec._names
    ids = {name: token for token, name in names.items()}
    output = written(tree, ids, placement)
    for pieces in chunkings(output, lambda text: [codec.token_bytes(t) for t in codec.encode_text(text)]):
        assert read_back(HarmonyParser(names, frozenset(TOOLS)), codec.control_ids, pieces) == tree, pieces


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
        read.append(read_back(HarmonyParser(names, frozenset(TOOLS)), codec.control_ids, pieces))
    assert read[0] == read[1]
    assert isinstance(read[0], Tree)
    assert letters(read[0], "W") == "".join(part for part in output if isinstance(part, str)).count("W")
