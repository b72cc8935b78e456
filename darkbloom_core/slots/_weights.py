"""The weight files of a checkpoint: which version of them is there, what it will take, and its digest.

Always true: a digest is computed once for each version of the files, and a version is what
size, time of change and inode say.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from darkbloom_core.contracts import ModelDescription
from darkbloom_core.memory import weight_estimate

READ_BYTES = 16 * 1024**2

Version = tuple[tuple[str, int, int, int], ...]
"""Of each file in order of its name: name, size, nanoseconds of the last change, inode."""


def weights_version(path: Path) -> Version:
    """The version of the safetensors files in the folder ``path``; links are followed."""
    facts = ((file.name, file.stat()) for file in sorted(path.glob("*.safetensors")))
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in facts)


def estimated_weight_bytes(path: Path, description: ModelDescription) -> int:
    """What the weights at ``path`` may take while they load; the loader and the doctor both ask this."""
    on_disk = sum(size for _, size, _, _ in weights_version(path))
    return weight_estimate(on_disk, description.memory_per_disk_byte)


class Digests:
    """SHA-256 of weight files, remembered for as long as their version stays. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Path, Version], str] = {}
        self.computed = 0

    def of(self, path: Path) -> str:
        """The digest of all weight files in the folder ``path`` together, in order of their names."""
        with self._lock:
            version = weights_version(path)
            key = (path.resolve(), version)
            if key not in self._known:
                self._known[key] = self._compute(path, version)
                self.computed += 1
            return self._known[key]

    def _compute(self, path: Path, version: Version) -> str:
        whole = hashlib.sha256()
        for name, size, _, _ in version:
            whole.update(f"{name} {size}\n".encode())
            with (path / name).open("rb") as file:
                while data := file.read(READ_BYTES):
                    whole.update(data)
        return whole.hexdigest()
