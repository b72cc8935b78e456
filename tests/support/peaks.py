"""How much memory a piece of work takes at its peak, measured in a process of its own.

``ru_maxrss`` of a started process may begin with its parent's peak, so on Linux the peak of
the process's own address space is read, and set back before each measurement.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def grown_bytes(work: Callable[[], object]) -> int:
    """By how much the peak while ``work`` ran is above what there was before."""
    with contextlib.suppress(OSError):
        RESET.write_text("5")
    before = _bytes("VmRSS")
    work()
    return max(0, _bytes("VmHWM") - before)


def printed_numbers(script: str, *arguments: str) -> list[int]:
    """What ``script`` prints as whole numbers in a fresh process that finds the tests and their support."""
    folder = Path(__file__).parent
    paths = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", paths + script, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def _bytes(name: str) -> int:
    if not STATUS.exists():
        return resource.getrusage(
            resource.RUSAGE_SELF
        ).ru_maxrss  # bytes on macOS, where it is this process's own
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
