"""Style and types hold over the whole tree, as CI checks them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["ruff", "check", "."], "uv run ruff check --fix ."),
        (["ruff", "format", "--check", "."], "uv run ruff format ."),
        (["mypy"], "an ignore needs its reason beside it"),
    ],
    ids=["ruff check", "ruff format", "mypy"],
)
def test_the_tree_is_clean(arguments, advice):
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=230
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}\nWhat to do: {advice}"
