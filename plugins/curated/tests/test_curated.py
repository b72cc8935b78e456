"""The bundle pins what was tested together, and its catalogue says what its families really read."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from darkbloom_core.plugins import PluginOptions, load_plugins

PLUGINS = Path(__file__).resolve().parents[2]


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


BUNDLE = project(PLUGINS / "curated")


def families():
    plugins = load_plugins(PluginOptions(allow=frozenset({"gpt-oss", "gemma4"}), strict=True))
    return {model_type: family for family in plugins.families() for model_type in family.model_types}


def test_the_catalogue_lists_each_model_type_that_the_bundled_families_read():
    listed = {entry.name: entry.value for entry in entry_points(group="darkbloom.catalogue")}
    read = {model_type: type(family).__module__.split(".")[0] for model_type, family in families().items()}
    assert listed == read, "change darkbloom.catalogue in plugins/curated/pyproject.toml, then: uv sync"


def test_every_pinned_version_is_the_one_in_this_tree():
    found = [
        project(folder)
        for folder in (PLUGINS.parent, *(file.parent for file in PLUGINS.glob("*/pyproject.toml")))
    ]
    versions = {each["name"]: each["version"] for each in found}
    pinned = dict(requirement.split("==") for requirement in BUNDLE["dependencies"])
    assert pinned == {name: versions[name] for name in pinned}, (
        "bring plugins/curated/pyproject.toml up to date"
    )


@pytest.mark.parametrize("extra", ["cpu", "cuda12", "cuda13", "media"])
def test_the_bundle_passes_on_every_extra_of_the_core(extra):
    core = project(PLUGINS.parent)["optional-dependencies"]
    assert BUNDLE["optional-dependencies"].keys() == core.keys()
    assert BUNDLE["optional-dependencies"][extra] == [f"darkbloom-core[{extra}]"]
