"""Fixtures shared by the tests of the core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Done = subprocess.CompletedProcess[str]


@pytest.fixture
def process_environment(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that a test starts: nobody's settings, nobody's models. Tests may add to it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DARKBLOOM_", "HF_", "XDG_"))}
    return {**kept, "HOME": str(tmp_path / "home"), "COLUMNS": "200"}


@pytest.fixture
def run_python(process_environment: dict[str, str], tmp_path: Path) -> Callable[..., Done]:
    """Run this Python with the arguments given, in ``tmp_path``."""

    def run(*arguments: str, stdin: str = "") -> Done:
        return subprocess.run(
            [sys.executable, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env=process_environment,
            cwd=tmp_path,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def run_darkbloom(run_python: Callable[..., Done]) -> Callable[..., Done]:
    """Run the command line with the arguments given; it must leave with the exit code ``code``."""

    def run(*arguments: str, code: int = 0, stdin: str = "") -> Done:
        done = run_python("-c", "from darkbloom_core.cli import main; main()", *arguments, stdin=stdin)
        assert done.returncode == code, done.stderr or done.stdout
        return done

    return run


@pytest.fixture
def make_plugin(process_environment: dict[str, str], tmp_path: Path) -> Callable[[str, str], Path]:
    """Install a plugin for the processes that the test starts: a name, and the source of its module."""

    def make(name: str, source: str) -> Path:
        site = tmp_path / "site"
        metadata = site / f"darkbloom_{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        module = site / f"darkbloom_{name}.py"
        module.write_text(source)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: darkbloom-{name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[darkbloom]\n{name} = darkbloom_{name}\n")
        process_environment["PYTHONPATH"] = str(site)
        return module

    return make
