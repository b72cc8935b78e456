"""A memory control group below this process's own, version 1 or 2: what a container does to a server in it.

Needs Linux and the right to make groups: root, or a group that was delegated to the user.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

MOUNTS = Path("/sys/fs/cgroup")


class ControlGroup:
    """``limit_bytes`` hold for all processes of the group together."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.version, parent = _own_group()
        self._folder = parent / name
        try:
            self._folder.mkdir()
            if self.version == 2 and not self._file("memory.max").exists():
                _delegate(parent)
            self._file("memory.limit_in_bytes" if self.version == 1 else "memory.max").write_text(
                str(limit_bytes)
            )
        except OSError as error:
            raise RuntimeError(
                f"this test needs a memory control group of its own and cannot make one at {self._folder} "
                f"({error}); run it as root on a machine, or in a container, that allows it"
            ) from error

    def python(self, folder: Path) -> Path:
        """A program that enters the group and then is this Python."""
        program = folder / "python-in-group"
        program.write_text(
            f'#!/bin/sh\necho $$ > "{self._file("cgroup.procs")}" && exec "{sys.executable}" "$@"\n'
        )
        program.chmod(0o755)
        return program

    @property
    def peak_bytes(self) -> int:
        """The most that its processes had together, page cache included."""
        return int(
            self._file("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak").read_text()
        )

    @property
    def kills(self) -> int:
        """How many processes the kernel killed because the group had too much."""
        counts = self._file("memory.oom_control" if self.version == 1 else "memory.events").read_text()
        return next(int(line.split()[1]) for line in counts.splitlines() if line.startswith("oom_kill "))

    def close(self) -> None:
        """Remove the group once its processes are gone."""
        deadline = time.monotonic() + 10
        while self._file("cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._folder.rmdir()

    def _file(self, name: str) -> Path:
        return self._folder / name


def _own_group() -> tuple[int, Path]:
    """The version that has this process's memory, and the folder of its group."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return 1, _seen_from_here(MOUNTS / "memory", path)
    path = next(path for _, controllers, path in lines if not controllers)
    return 2, _seen_from_here(MOUNTS, path)


def _seen_from_here(mount: Path, path: str) -> Path:
    """The group's folder; a container may see its own group at the mount."""
    folder = mount / path.strip("/")
    return folder if folder.is_dir() else mount


def _delegate(parent: Path) -> None:
    """Let groups below ``parent`` have limits. Version 2 wants no process beside them: they move to a group too."""
    beside = parent / "beside"
    beside.mkdir(exist_ok=True)
    for process in _processes(parent):
        (beside / "cgroup.procs").write_text(process)
    (parent / "cgroup.subtree_control").write_text("+memory")


def _processes(group: Path) -> Iterator[str]:
    for process in (group / "cgroup.procs").read_text().split():
        if Path(f"/proc/{process}").exists():
            yield process
