"""Packages whose own ``__init__`` waits until something of it is asked for."""

from __future__ import annotations

import importlib
import sys

import pytest

from darkbloom_core.checkpoint import defer_package

SOURCE = """
import sys
sys.ran = sys.__dict__.get("ran", 0) + 1
if "fails" in sys.__dict__:
    raise RuntimeError("no")
from .part import VALUE
ALL = VALUE + 1
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "of_many_parts"
    folder.mkdir()
    (folder / "__init__.py").write_text(SOURCE)
    (folder / "part.py").write_text("VALUE = 41\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "ran", 0, raising=False)
    yield folder.name
    for name in [each for each in sys.modules if each.partition(".")[0] == folder.name]:
        del sys.modules[name]


def test_a_part_is_imported_without_the_rest_which_runs_once_when_it_is_asked_for(package):
    defer_package(package)
    assert importlib.import_module(f"{package}.part").VALUE == 41
    assert sys.ran == 0
    whole = importlib.import_module(package)
    assert sys.ran == 0
    assert (whole.ALL, whole.part.VALUE, sys.ran) == (42, 41, 1)
    defer_package(package)
    assert importlib.import_module(package) is whole
    with pytest.raises(AttributeError):
        _ = whole.nothing
    assert sys.ran == 1


def test_a_package_that_fails_says_so_each_time_it_is_asked(package, monkeypatch):
    defer_package(package)
    monkeypatch.setattr(sys, "fails", True, raising=False)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            _ = importlib.import_module(package).ALL
    monkeypatch.delattr(sys, "fails")
    assert importlib.import_module(package).ALL == 42


def test_what_is_imported_or_not_installed_is_left_alone(package):
    whole = importlib.import_module(package)
    defer_package(package)
    assert sys.modules[package] is whole
    defer_package("no_such_package")
    assert "no_such_package" not in sys.modules


def test_loading_a_model_of_an_installed_family_does_not_import_transformers(run_python):
    done = run_python(
        "-c",
        "import json, sys\n"
        "from darkbloom_core.contracts import Device, Placement\n"
        "from darkbloom_core.plugins import load_plugins\n"
        "plugins, device = load_plugins(), Device('cpu')\n"
        "for path in plugins.checkpoints().values():\n"
        "    config = json.loads((path / 'config.json').read_text())\n"
        "    family = plugins.family_for(config)\n"
        "    description = family.describe(config, device)\n"
        "    family.codec(path, description)\n"
        "    family.load(path, description, Placement(device))\n"
        "print('mlx_lm.models' in sys.modules, 'transformers' in sys.modules)\n",
    )
    assert done.stdout == "True False\n", done.stderr
