"""What the tests of both dialects share: scripted outputs, and a server with toy models and the dialects' routes."""

import pytest
from darkbloom_dialects import server_routes
from hypothesis import strategies as st
from toy_server import ToyServer

from darkbloom_core.contracts import ContentDelta, Malformed, ReasoningDelta, ToolCallDelta
from darkbloom_core.engine import OutputDelta, OutputEnd, Timings, Usage
from darkbloom_core.settings import Settings

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)

letters = st.sampled_from('ab{}"\\\n\t\u2028\u0085é中😀')
texts = st.text(letters, min_size=1, max_size=12)
arguments = st.sampled_from(
    ["", "{}", '{"city": "Paris"}', '{"a": [1, {"b": "\\u2028"}], "c": nu', "[1]", '{"a"}']
)
parts = st.tuples(st.sampled_from(["content", "reasoning"]), texts) | st.tuples(
    st.just("call"), arguments | texts
)


def cut(draw, text):
    """``text`` in pieces, cut anywhere."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[first:last] for first, last in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def scripts(draw):
    """What an output says, as (kind, text), and the events that bring it, cut anywhere."""
    script = draw(st.lists(parts, max_size=5))
    deltas, calls = [], 0
    for kind, text in script:
        pieces = cut(draw, text)
        if kind == "call":
            deltas.append(ToolCallDelta(calls, f"tool{calls}", pieces[0]))
            deltas += [ToolCallDelta(calls, None, piece) for piece in pieces[1:]]
            calls += 1
        else:
            make = ContentDelta if kind == "content" else ReasoningDelta
            deltas += [make(piece) for piece in pieces]
        if draw(st.booleans()):
            deltas.append(Malformed("broken"))
    events = []
    while deltas:
        size = draw(st.integers(1, 4))
        events.append(OutputDelta(tuple(deltas[:size])))
        deltas = deltas[size:]
    reason = draw(st.sampled_from(["length", "tool_calls" if calls else "stop"]))
    return script, [*events, OutputEnd(reason, USAGE, Timings())]


@pytest.fixture(scope="session")
def scripted_outputs():
    """A strategy of outputs, each with its script."""
    return scripts()


@pytest.fixture(scope="session")
def dialect_server(tmp_path_factory):
    """A server with ``toy/plain``, ``toy/slow`` and ``toy/broken``, and small bounds."""
    tables = {"server": {"body_bytes_limit": 100_000}, "options": {"dialects": {}}}
    models = {"toy/plain": {}, "toy/slow": {"seconds": 0.02}, "toy/broken": {"breaks_on": 33}}
    routes = server_routes(Settings(**tables))
    folder = tmp_path_factory.mktemp("toys")
    with ToyServer(folder, models, plugin_routes=routes, **tables).running() as server:
        yield server
