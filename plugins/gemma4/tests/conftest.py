"""What the tests of Gemma 4 share: random checkpoints, loaded once, and running them through the engine's caches."""

import importlib.util
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from darkbloom_gemma4._family import Gemma4Family

from darkbloom_core.contracts import Device, Placement
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
            mx.eval(inputs, new, batch.touched)
            logits += new
            done += length
        assert done == len(ids)
        return np.concatenate([np.array(each.astype(mx.float32)) for each in logits])

    return run
