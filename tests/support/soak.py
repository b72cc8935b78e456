"""Long runs: how long they are here, and where what they found is kept.

``SOAK_SAMPLE=1`` makes them short, ``SOAK_RESULTS=1`` writes what they found to ``docs/soak``,
with the machine and the commit beside it: one JSON file of each, and one row in the table of
``docs/soak/README.md``.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "soak"
BARS = "▁▂▃▄▅▆▇█"


def length(full: int, sample: int) -> int:
    """How long a run is: ``full``, or ``sample`` if a sample was asked for."""
    return sample if os.environ.get("SOAK_SAMPLE") == "1" else full


def keep(name: str, summary: str, figures: Mapping[str, Any]) -> None:
    """Print what a run found, and write it down if that was asked for."""
    print(f"{name}: {summary}")  # noqa: T201  # pytest -s shows it while a long run goes on
    if os.environ.get("SOAK_RESULTS") != "1":
        return
    found = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": _commit(), "machine": _machine()}
    file = FOLDER / f"{name}.json"
    file.write_text(json.dumps({**found, **figures}, indent=1) + "\n", encoding="utf-8")
    row = f"| [{name}]({file.name}) | {found['date']} | {found['commit']} | {found['machine']} | {summary} |"
    with (FOLDER / "README.md").open("r+", encoding="utf-8") as table:
        fcntl.flock(table, fcntl.LOCK_EX)  # two processes share the tests
        lines = table.read().splitlines()
        others = [line for line in lines if not line.startswith(f"| [{name}](")]
        table.seek(0)
        table.write("\n".join([*others, row]) + "\n")
        table.truncate()


def curve(values: Sequence[float]) -> str:
    """One bar for each value, from the least to the most."""
    low, high = min(values), max(values)
    steps = [round((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 0 for value in values]
    return "".join(BARS[step] for step in steps)


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "darkbloom_core", "plugins")
    return git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")


def _machine() -> str:
    from darkbloom_bench._machine import this_machine

    from darkbloom_core.slots import current_device

    return str(this_machine(current_device()))


def one_at_first(models: Sequence[str]) -> list[Any]:
    """Parameters for ``parametrize``: the others are asked the same in the long runs."""
    return [models[0], *(pytest.param(model, marks=pytest.mark.soak) for model in models[1:])]
