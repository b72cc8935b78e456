"""What the tests of Gemma 4 share: random checkpoints, loaded once, and running them through the engine's caches."""

import importlib.util
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from darkbloom_gemma4._family import Gemma4Family

from darkbloom_core.contracts import (
    Chat,
    ContentDelta,
    Device,
    Message,
    Placement,
    ReasoningDelta,
    TextPart,
    Tool,
    ToolCall,
    ToolCallDelta,
)
from darkbloom_core.engine import KvStore, step_batch

HERE = Path(__file__).parent
CPU = Device("cpu")


@pytest.fixture(scope="session")
def family():
    return Gemma4Family()


@pytest.fixture(scope="session")
def checkpoints():
    """The module that makes random checkpoints; the script that writes the goldens uses it too."""
    spec = importlib.util.spec_from_file_location("gemma4_checkpoints", HERE / "checkpoints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def demo_folder():
    import darkbloom_demo

    return Path(darkbloom_demo.__file__).parent / "checkpoints" / "gemma4"


@pytest.fixture(scope="session")
def golden():
    """Arrays of a golden file."""

    def read(name):
        with np.load(HERE / "golden" / f"{name}.npz") as file:
            return dict(file)

    return read


@pytest.fixture(scope="session")
def load(family):
    """Load a folder on the CPU, once for each folder."""
    loaded = {}

    def load(folder):
        if folder not in loaded:
            description = family.describe(json.loads((folder / "config.json").read_text()), CPU)
            loaded[folder] = family.load(folder, description, Placement(CPU))
        return loaded[folder]

    return load


@pytest.fixture(scope="session")
def random_checkpoint(checkpoints, tmp_path_factory):
    """The folder of a random checkpoint, written once."""
    written = {}

    def write(model, layout):
        if (model, layout) not in written:
            folder = tmp_path_factory.mktemp(f"{model}-{layout}")
            written[model, layout] = checkpoints.write(folder, model, layout)
        return written[model, layout]

    return write


@pytest.fixture(scope="session")
def run():
    """Logits ``[tokens, vocabulary]`` of ``ids``, run in pieces of the given sizes, one layer at a time."""

    def run(model, ids, pieces, positions=None):
        store = KvStore(model.description.layers, max_rows=1)
        row = store.open_row(len(ids), len(ids) + 1)
        wanted = set(range(len(ids)) if positions is None else positions)
        logits, done = [], 0
        for length in pieces:
            batch = step_batch(store, [row], [done], length)
            inputs = model.embed(mx.array([ids[done : done + length]], mx.int32))
            for index in range(len(model.description.layers)):
                inputs = model.run_layers(inputs, batch, index, index + 1)
            new = [
                model.logits(inputs[0][:, place : place + 1])
                for place in range(length)
                if done + place in wanted
            ]
            mx.eval(inputs, new)
            logits += new
            done += length
        assert done == len(ids)
        return np.concatenate([np.array(each.astype(mx.float32)) for each in logits])

    return run


@pytest.fixture(scope="session")
def demo_prompts(demo_folder):
    """(request in the shape of OpenAI's API, (content, reasoning, calls) that answer it)."""
    requests = json.loads((demo_folder / "prompts.json").read_text())
    return [
        (request, (request["answer"] or "", request.get("reasoning", ""), request.get("calls", [])))
        for request in requests
    ]


@pytest.fixture(scope="session")
def ask():
    """The greedy answer to a request: content, reasoning, calls."""
    return lambda model, codec, request: _answer(model, codec, _as_chat(request))


def _as_chat(request):
    """A request in the shape of OpenAI's API."""
    messages = []
    for one in request["messages"]:
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in one.get("tool_calls", ())
        )
        messages.append(
            Message(
                role=one["role"],
                content=(TextPart(one["content"]),) if one["content"] else (),
                tool_calls=calls,
                tool_call_id=one.get("tool_call_id"),
            )
        )
    tools = tuple(Tool(**tool["function"]) for tool in request.get("tools", ()))
    return Chat(
        messages=tuple(messages),
        tools=tools,
        tool_choice=request.get("tool_choice", "auto"),
        reasoning_effort=request.get("reasoning_effort"),
    )


def _answer(model, codec, chat, limit=120):
    """The greedy answer, through the engine's caches: content, reasoning, calls."""
    prompt, parser = codec.encode_chat(chat).ids, codec.parser(chat)
    store = KvStore(model.description.layers, max_rows=1)
    row = store.open_row(len(prompt), len(prompt) + limit)
    ids, deltas, done, count = list(prompt), [], 0, len(model.description.layers)
    while True:
        batch = step_batch(store, [row], [done], len(ids))
        hidden = model.run_layers(model.embed(mx.array([ids], mx.int32)), batch, 0, count)[0]
        done += len(ids)
        token = mx.argmax(model.logits(hidden[:, -1:])[0]).item()
        if token in codec.control_ids:
            deltas += parser.control(token)
        else:
            deltas += parser.text(codec.token_bytes(token).decode())
        if token in model.stop_ids:
            break
        assert done < len(prompt) + limit
        ids = [token]
    deltas += parser.finish()
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    return (
        content,
        reasoning,
        [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls],
    )
