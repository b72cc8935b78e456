"""SHA-256 of checkpoints' files, computed once for each version of a file, also across processes.

Always true: a version is what size, time of change and inode say; a file that changes while
it is read gives no digest that is remembered; a cache on disk that is damaged counts as empty.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

READ_BYTES = 16 * 1024**2
THREADS = 4


@dataclass(frozen=True, slots=True)
class FileVersion:
    """Which version of a file is there."""

    size_bytes: int
    changed_nanoseconds: int
    inode: int


def file_version(path: Path) -> FileVersion:
    """The version of the file at ``path``; links are followed."""
    stat = path.stat()
    return FileVersion(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class Digests:
    """Thread-safe. ``file`` is where they are remembered, for this process alone if it is None.

    ``computed`` counts the files that were read.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[str, tuple[FileVersion, str]] | None = None
        self.computed = 0

    def of(self, path: Path) -> str:
        """The digest of what decides a checkpoint's numbers: its config and all weight files in the folder ``path``."""
        files = [*path.glob("config.json"), *sorted(path.glob("*.safetensors"))]
        whole = hashlib.sha256()
        for file, digest in zip(files, self._of_files(files), strict=True):
            whole.update(f"{file.name} {digest}\n".encode())
        return whole.hexdigest()

    def begin(self, path: Path) -> Future[str]:
        """``of(path)`` on a thread of its own, which nobody waits for if the process ends."""
        future: Future[str] = Future()

        def run() -> None:
            try:
                future.set_result(self.of(path))
            except BaseException as fault:
                future.set_exception(fault)

        threading.Thread(target=run, name="digests", daemon=True).start()
        return future

    def _of_files(self, files: Sequence[Path]) -> list[str]:
        found: list[str] = [""] * len(files)
        faults: list[BaseException] = []
        places = iter(range(len(files)))

        def work() -> None:
            try:
                for place in places:  # one step of a range iterator is atomic
                    found[place] = self._of_file(files[place].resolve())
            except BaseException as fault:
                faults.append(fault)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(THREADS, len(files)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        self._write()
        return found

    def _of_file(self, file: Path) -> str:
        version = file_version(file)
        with self._lock:
            if self._known is None:
                self._known = self._read()
            known = self._known.get(str(file))
        if known is not None and known[0] == version:
            return known[1]
        digest = hashlib.sha256()
        with file.open("rb") as content:
            while data := content.read(READ_BYTES):
                digest.update(data)
        with self._lock:
            self.computed += 1
            assert self._known is not None
            if file_version(file) == version:
                self._known[str(file)] = (version, digest.hexdigest())
        return digest.hexdigest()

    # --- on disk ---------------------------------------------------------------------------

    def _read(self) -> dict[str, tuple[FileVersion, str]]:
        if self._file is None or not self._file.exists():
            return {}
        try:
            entries = json.loads(self._file.read_text(encoding="utf-8"))
            return {
                name: (FileVersion(*map(int, entry[:3])), str(entry[3])) for name, entry in entries.items()
            }
        except (OSError, ValueError, TypeError, AttributeError, IndexError, KeyError) as fault:
            log.warning("%s cannot be read, digests are computed anew: %s", self._file, fault)
            return {}

    def _write(self) -> None:
        if self._file is None:
            return
        with self._lock:
            here = {name: entry for name, entry in (self._known or {}).items() if Path(name).exists()}
            text = json.dumps(
                {
                    name: [version.size_bytes, version.changed_nanoseconds, version.inode, digest]
                    for name, (version, digest) in sorted(here.items())
                },
                indent=1,
            )
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with tempfile.NamedTemporaryFile(
                    "w", dir=self._file.parent, encoding="utf-8", delete=False
                ) as file:
                    file.write(text)
                Path(file.name).replace(self._file)
            except OSError as fault:
                log.warning("digests of weights cannot be remembered in %s: %s", self._file, fault)
