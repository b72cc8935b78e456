"""What a container (a control group, version 1 or 2) lets this process have. Linux only; None elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT_BYTES = 2**60
"""Version 1 writes a number above this where there is no limit."""


@dataclass(frozen=True, slots=True)
class ContainerMemory:
    """The tightest limit of this process's group and those above it, and the least that one of them has left.

    Page cache that the kernel can drop at once counts as free.
    """

    limit_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class _Files:
    limit: str
    usage: str
    droppable: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def container_memory(root: Path = Path("/")) -> ContainerMemory | None:
    """The limit under which this process runs, or None if there is none. ``root`` holds ``proc`` and ``sys``."""
    found = [memory for folder, files in _groups(root) if (memory := _read(folder, files)) is not None]
    if not found:
        return None
    return ContainerMemory(
        limit_bytes=min(memory.limit_bytes for memory in found),
        free_bytes=min(memory.free_bytes for memory in found),
    )


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Folders of this process's memory groups, the innermost first; those that a container hides are left out."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _ancestry(mounts / "memory", path, _VERSION_1)
        elif not controllers:
            unified = mounts / "unified"
            yield from _ancestry(unified if unified.is_dir() else mounts, path, _VERSION_2)


def _ancestry(mount: Path, path: str, files: _Files) -> Iterator[tuple[Path, _Files]]:
    folder = mount / path.strip("/")
    while folder != mount:
        yield folder, files
        folder = folder.parent
    yield mount, files


def _read(folder: Path, files: _Files) -> ContainerMemory | None:
    limit = _text(folder / files.limit).strip()
    if not limit.isdecimal() or int(limit) >= NO_LIMIT_BYTES:
        return None
    used = int(_text(folder / files.usage) or 0)
    entries = (line.split() for line in _text(folder / "memory.stat").splitlines())
    droppable = next((int(entry[1]) for entry in entries if entry[0] == files.droppable), 0)
    return ContainerMemory(int(limit), max(0, int(limit) - max(0, used - droppable)))


def _text(file: Path) -> str:
    """The file's text; empty if there is no such file, as outside Linux or inside a container."""
    try:
        return file.read_text()
    except OSError:
        return ""
