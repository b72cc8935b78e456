"""What a cache tier implements. A tier holds bytes: it never sees an MLX object, a token or a tenant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from darkbloom_core.contracts._telemetry import Emitter


@dataclass(frozen=True, slots=True)
class PartKey:
    """A block's part: the block's chained hash (32 bytes), and ``"full"``, ``"window"`` or ``"state"``."""

    block: bytes
    part: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read the part into ``buffer``, which is writable and exactly as long as the part."""

    key: PartKey
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts since the tier was opened, and bytes held now.

    ``read_milliseconds_per_byte`` is what the tier has measured of its fetches, None if it has
    not yet; the planner begins with it.
    """

    parts: int = 0
    bytes_used: int = 0
    bytes_limit: int = 0
    hits: int = 0
    misses: int = 0
    offered: int = 0
    dropped: int = 0
    evicted: int = 0
    damaged: int = 0
    read_milliseconds_per_byte: float | None = None
    detail: dict[str, int] = field(default_factory=dict)


class CacheTier(Protocol):
    """An open tier of one model.

    Calls come from any thread and return at once; the tier works in threads of its own. A
    tier that fails in any way only ever misses: it never fails a request.
    """

    def probe(self, keys: Sequence[PartKey]) -> Sequence[int | None]:
        """For each key the part's length in bytes, or None. Memory only: no I/O."""
        ...

    def fetch(self, fetches: Sequence[Fetch]) -> Future[Sequence[bool]]:
        """Fill the buffers. The result says for each whether it was filled completely and is authentic."""
        ...

    def offer(self, key: PartKey, data: memoryview) -> bool:
        """Keep a copy of ``data``, which is valid only during the call; False if the tier refuses."""
        ...

    def used(self, keys: Sequence[PartKey]) -> Sequence[bool]:
        """A prompt is prefilled that consists of these parts, in the order of its blocks.

        True for each that the tier has not and would take now, because prompts come back to
        it. Memory only: no I/O. This is how a tier learns of uses that a tier above it serves.
        """
        ...

    def forget(self, keys: Sequence[PartKey]) -> None:
        """Drop these parts if they are held."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Stop the threads. What is durable stays."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """What a tier is opened with, and as ``options`` the settings table named after it.

    ``directory`` is the tier's own, the same for all models and processes; it may not exist
    yet. ``bytes_limit`` is of what it keeps of all models together, None for its own default.
    ``reserve`` is called with how many bytes of parts the tier is about to hold in memory
    altogether, buffers of ``fetch`` not counted; False: it may not, and holds what it held.
    Its work may be told as events to ``emitter``.
    """

    model: str
    directory: Path
    bytes_limit: int | None
    reserve: Callable[[int], bool]
    emitter: Emitter
    options: dict[str, Any]


class CacheTierFactory(Protocol):
    """What the hook ``cache_tiers`` returns."""

    @property
    def name(self) -> str: ...

    def open(self, context: TierContext) -> CacheTier:
        """Open the tier for one model. Raises ``SetupError`` with the reason if it cannot be had here."""
        ...
