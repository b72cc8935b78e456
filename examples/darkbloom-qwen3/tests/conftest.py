"""What the tests share: a random checkpoint in each layout, loaded once."""

import importlib.util
import json
from pathlib import Path

import pytest
from darkbloom_qwen3._family import Qwen3Family

from darkbloom_core.contracts import Device, Placement

HERE = Path(__file__).parent
CPU = Device("cpu")


@pytest.fixture(scope="session")
def checkpoints():
    """The module that makes the checkpoints; the script that writes the golden logits uses it too."""
    spec = importlib.util.spec_from_file_location("qwen3_checkpoints", HERE / "checkpoints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def folder(checkpoints, tmp_path_factory):
    """The folder of a layout, written once. Nobody changes it: ``copy_of`` is for that."""
    written = {}

    def write(layout):
        if layout not in written:
            written[layout] = checkpoints.write(tmp_path_factory.mktemp(layout), layout)
        return written[layout]

    return write


@pytest.fixture
def copy_of(checkpoints, tmp_path):
    """A checkpoint of a layout for one test alone, with changed fields in its config."""

    def copy(layout, **fields):
        path = checkpoints.write(tmp_path / layout, layout)
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
        return path

    return copy


@pytest.fixture(scope="session")
def load():
    """Load a checkpoint folder as the core does, once for each folder."""
    loaded = {}

    def load(path):
        if path not in loaded:
            family = Qwen3Family()
            description = family.describe(json.loads((path / "config.json").read_text()), CPU)
            loaded[path] = family.load(path, description, Placement(CPU))
        return loaded[path]

    return load
