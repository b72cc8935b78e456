"""The weight files of a checkpoint: which version of them is there, and what it will take."""

from __future__ import annotations

from pathlib import Path

from darkbloom_core.contracts import ModelDescription
from darkbloom_core.memory import weight_estimate

Version = tuple[tuple[str, int, int, int], ...]
"""Of each file in order of its name: name, size, nanoseconds of the last change, inode."""


def weights_version(path: Path) -> Version:
    """The version of the safetensors files in the folder ``path``; links are followed."""
    facts = ((file.name, file.stat()) for file in sorted(path.glob("*.safetensors")))
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in facts)


def estimated_weight_bytes(path: Path, description: ModelDescription) -> int:
    """What the weights at ``path`` may take while they load; the loader and the doctor both ask this."""
    return weight_estimate(_disk_bytes(path), description.memory_per_disk_byte)


def expected_weight_bytes(path: Path, description: ModelDescription) -> int:
    """What the weights at ``path`` are expected to take once they are loaded."""
    return int(_disk_bytes(path) * description.memory_per_disk_byte)


def _disk_bytes(path: Path) -> int:
    return sum(size for _, size, _, _ in weights_version(path))
