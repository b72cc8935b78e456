"""What plugins may rely on changes only on purpose."""

import difflib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool():
    specification = importlib.util.spec_from_file_location(
        "public_surface", ROOT / "tools" / "public_surface.py"
    )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_public_surface_is_the_one_that_is_written_down(tool):
    written = tool.FILE.read_text(encoding="utf-8")
    difference = "\n".join(
        difflib.unified_diff(written.splitlines(), tool.surface().splitlines(), "file", "code", lineterm="")
    )
    assert not difference, (
        f"the public surface has changed:\n{difference}\nIf that is meant: raise API_VERSION in "
        "darkbloom_core/contracts/__init__.py (the minor number if something was added, the major one if a plugin "
        "must be changed; not before the first release), say it in CHANGELOG.md, and run "
        "uv run python tools/public_surface.py"
    )


def test_every_exported_name_exists_and_says_what_it_is(tool):
    for name in tool.modules():
        module = importlib.import_module(f"darkbloom_core.{name}")
        assert module.__doc__, f"darkbloom_core.{name} needs a docstring"
        if name == "hookspecs":
            continue
        assert module.__all__ == sorted(module.__all__, key=lambda export: (not export.isupper(), export)), (
            f"darkbloom_core.{name}.__all__ must be sorted: uv run ruff check --fix"
        )
        for export in module.__all__:
            assert hasattr(module, export), (
                f"darkbloom_core.{name}.__all__ names {export}, which is not there"
            )


def test_every_hook_has_one_line_that_says_what_it_is_for(tool):
    hookspecs = importlib.import_module("darkbloom_core.hookspecs")
    for name in tool.exported(hookspecs):
        if name not in ("hookspec", "hookimpl"):
            documentation = getattr(hookspecs, name).__doc__ or ""
            assert documentation, f"the hook {name} needs a docstring of one line"
            assert "\n" not in documentation, f"the docstring of the hook {name} must be one line"
