"""Every part's file in the cache, of all models, and which was used longest ago. Memory only; thread-safe.

Always true: what the last scan found, and what was written or removed since, is here; the
oldest goes first, and of parts that were used together the one that comes last in its prompt.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from dataclasses import dataclass

TOGETHER_SECONDS = 0.001
"""Between the stamps of two parts that were used together and follow each other in a prompt."""


@dataclass(slots=True, eq=False)
class Entry:
    """One file. ``noted_at`` is the time of its last use as the disk knows it."""

    folder: str
    file: str
    part_bytes: int | None
    disk_bytes: int
    used_at: float
    noted_at: float

    @property
    def key(self) -> tuple[str, str]:
        return self.folder, self.file


@dataclass(frozen=True, slots=True)
class Totals:
    files: int
    part_bytes: int
    disk_bytes: int


class Index:
    """By folder and file."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[tuple[str, str], Entry] = {}
        self._heap: list[tuple[float, tuple[str, str]]] = []
        self._totals: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, folder: str, files: Iterable[str]) -> list[Entry | None]:
        """The entries of these files."""
        with self._lock:
            return [self._entries.get((folder, file)) for file in files]

    def add(self, entry: Entry) -> None:
        """Enter a file, in the place of what was known under its name."""
        with self._lock:
            self.remove(entry.key)
            self._entries[entry.key] = entry
            totals = self._totals.setdefault(entry.folder, [0, 0, 0])
            for place, change in enumerate((1, entry.part_bytes or 0, entry.disk_bytes)):
                totals[place] += change
            self._push(entry)

    def remove(self, key: tuple[str, str]) -> Entry | None:
        """Forget a file; gives what was known."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                totals = self._totals[entry.folder]
                for place, change in enumerate((1, entry.part_bytes or 0, entry.disk_bytes)):
                    totals[place] -= change
            return entry

    def use(self, entries: Iterable[Entry], now: float) -> None:
        """These were used together, in this order: what follows in a prompt is of no use without what precedes."""
        with self._lock:
            for place, entry in enumerate(entries):
                stamp = now - place * TOGETHER_SECONDS
                if stamp > entry.used_at and self._entries.get(entry.key) is entry:
                    entry.used_at = stamp
                    self._push(entry)

    def oldest(self) -> Entry | None:
        """What was used longest ago."""
        with self._lock:
            while self._heap:
                stamp, key = self._heap[0]
                entry = self._entries.get(key)
                if entry is not None and entry.used_at == stamp:
                    return entry
                heapq.heappop(self._heap)
            return None

    def all(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def totals(self, folder: str | None = None) -> Totals:
        """Of one model's folder, or of all."""
        with self._lock:
            if folder is not None:
                return Totals(*self._totals.get(folder, (0, 0, 0)))
            return Totals(*(sum(each[place] for each in self._totals.values()) for place in range(3)))

    def _push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.used_at, entry.key))
        if len(self._heap) > 1024 + 4 * len(self._entries):
            self._heap = sorted((each.used_at, each.key) for each in self._entries.values())
