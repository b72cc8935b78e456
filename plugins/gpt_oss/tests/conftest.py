"""What the tests of GPT-OSS share: checkpoints, loaded once, and two ways to run them.

``run_engine`` goes through the engine's caches. ``run_plain`` goes through caches written
here from the contract's words alone, with an explicit mask and a plain softmax, so that a
mistake in the engine's attention cannot hide itself.
"""

import importlib.util
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from darkbloom_gpt_oss._family import GptOss

from darkbloom_core.contracts import Device, Placement
from darkbloom_core.engine import KvStore, step_batch

HERE = Path(__file__).parent
CPU = Device("cpu")


class PlainCache:
    """One layer of one row: every key and value ever seen, in order."""

    def __init__(self, kind):
        self.kind = kind
        self.k = self.v = None

    def attend(self, q, k, v, *, sinks=None):
        kind = self.kind
        assert q.dtype == k.dtype == v.dtype
        assert q.shape[1:] == (kind.q_heads, k.shape[2], kind.k_dim)
        assert k.shape[1::2] == v.shape[1::2] == (kind.kv_heads, kind.k_dim)
        self.k = k if self.k is None else mx.concatenate([self.k, k], axis=2)
        self.v = v if self.v is None else mx.concatenate([self.v, v], axis=2)
        held, length = self.k.shape[2], q.shape[2]
        copies = kind.q_heads // kind.kv_heads
        keys, values = (mx.repeat(each.astype(mx.float32), copies, axis=1) for each in (self.k, self.v))
        scores = q.astype(mx.float32) @ keys.swapaxes(-1, -2) * kind.scale
        query = mx.arange(held - length, held)[:, None]
        key = mx.arange(held)[None]
        seen = key <= query
        if kind.window is not None:
            seen = seen & (key > query - kind.window)
        scores = mx.where(seen, scores, -mx.inf)
        if sinks is not None:
            column = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
            scores = mx.concatenate([scores, column], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., :held]
        return (weights @ values).astype(q.dtype)


class PlainBatch:
    """One row."""

    def __init__(self, caches, position):
        self.caches = caches
        self.offsets = mx.array([position], mx.int32)


@pytest.fixture(scope="session")
def family():
    return GptOss()


@pytest.fixture(scope="session")
def checkpoints():
    """The module that makes random checkpoints; the script that writes the goldens uses it too."""
    spec = importlib.util.spec_from_file_location("gpt_oss_checkpoints", HERE / "checkpoints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def demo_folder():
    import darkbloom_demo

    return Path(darkbloom_demo.__file__).parent / "checkpoints" / "gpt-oss"


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
            written[model, layout] = checkpoints.write(tmp_path_factory.mktemp(layout), model, layout)
        return written[model, layout]

    return write


@pytest.fixture(scope="session")
def variants():
    """The script that makes quantised variants of the demo checkpoint."""
    file = HERE.parents[2] / "tools" / "demo" / "make_variants.py"
    spec = importlib.util.spec_from_file_location("make_variants", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def variant(variants, tmp_path_factory):
    """The folder of a variant of the demo checkpoint, written once."""
    written = {}

    def write(name):
        if name not in written:
            written[name] = getattr(variants, f"write_{name}")(tmp_path_factory.mktemp(name))
        return written[name]

    return write


def _run(model, ids, pieces, batch_at, wanted=None):
    logits, done = [], 0
    for length in pieces:
        batch = batch_at(done, length)
        inputs = model.embed(mx.array([ids[done : done + length]], mx.int32))
        for index in range(len(model.description.layers)):
            inputs = model.run_layers(inputs, batch, index, index + 1)
        places = [place for place in range(length) if wanted is None or done + place in wanted]
        new = [model.logits(inputs[0][:, place : place + 1]) for place in places]
        mx.eval(new)
        logits += new
        done += length
    assert done == len(ids)
    return np.concatenate([np.array(each.astype(mx.float32)) for each in logits])


@pytest.fixture(scope="session")
def run_engine():
    """Logits ``[tokens, vocabulary]`` of ``ids``, run in pieces of the given sizes, one layer at a time."""

    def run(model, ids, pieces, wanted=None):
        store = KvStore(model.description.layers, max_rows=1)
        row = store.open_row(len(ids), len(ids) + 1)
        return _run(model, ids, pieces, lambda done, length: step_batch(store, [row], [done], length), wanted)

    return run


@pytest.fixture(scope="session")
def run_plain():
    """As ``run_engine``, through the caches of this file."""

    def run(model, ids, pieces):
        caches = [PlainCache(kind) for kind in model.description.layers]
        return _run(model, ids, pieces, lambda done, _: PlainBatch(caches, done))

    return run


@pytest.fixture(scope="session")
def answer(family):
    """The folded deltas of a greedy answer to a chat, through the engine's caches, and what it stopped with."""

    def answer(model, folder, chat, limit=160):
        codec = family.codec(folder, model.description)
        ids = codec.encode_chat(chat).ids
        store = KvStore(model.description.layers, max_rows=1)
        row = store.open_row(len(ids), len(ids) + limit)
        parser, shown = codec.parser(chat), {}
        position, new = 0, list(ids)
        while limit:
            for start in range(0, len(new), 256):
                piece = new[start : start + 256]
                batch = step_batch(store, [row], [position], len(piece))
                inputs = model.embed(mx.array([piece], mx.int32))
                (hidden,) = model.run_layers(inputs, batch, 0, len(model.description.layers))
                position += len(piece)
                mx.eval(hidden)
            token = model.logits(hidden[:, -1:]).argmax(-1).item()
            is_control = token in codec.control_ids
            text = codec.token_bytes(token).decode()
            for delta in parser.control(token) if is_control else parser.text(text):
                kind = type(delta).__name__.removesuffix("Delta").lower()
                pieces = [getattr(delta, name, None) for name in ("name", "text", "arguments", "reason")]
                shown[kind] = shown.get(kind, "") + "".join(piece for piece in pieces if piece)
            if token in model.stop_ids:
                return shown, token
            new = [token]
            limit -= 1
        raise AssertionError(f"no end: {shown}")

    return answer
