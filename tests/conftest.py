"""What the core's tests share."""

import importlib
import sys
from pathlib import Path

import pytest


class ThrowawayDistributions:
    """Real distributions in a folder on ``sys.path``: modules, and the dist-info that registers them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plugin_names: set[str] = set()

    def install(self, name, plugins, modules, version="1.0", *, catalogue=None, folder=None):
        """``plugins`` maps entry-point names to modules, ``modules`` names to source text."""
        folder = folder or self.folder
        information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = {"darkbloom": plugins, "darkbloom.catalogue": catalogue or {}}
        lines = [
            line
            for group, entries in groups.items()
            if entries
            for line in [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        ]
        (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
        self.plugin_names |= plugins.keys()
        importlib.invalidate_caches()


@pytest.fixture
def throwaway_distributions(tmp_path, monkeypatch):
    """Install distributions for one test; afterwards neither they nor their modules are left."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield ThrowawayDistributions(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
