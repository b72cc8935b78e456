"""How much of a prompt to take from the cache, and which parts to fetch for it. Pure.

Always true: reuse ends where a cold prefill would end a chunk, and leaves at least one token
to compute; every part that is needed is there; a hit whose fetch takes
nearly as long as the prefill that it saves, or longer, is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from darkbloom_core.prefix._layout import PartName, PromptParts

PAYING_SHARE = 0.75
"""A hit is taken if it is expected to take at most this share of what it saves: both are estimates."""

Where: TypeAlias = Callable[[int, PartName], str | None]
"""Block number, part: the place that has it, the cheapest one if there are several, or None."""

Reason: TypeAlias = Literal["hit", "short", "absent", "window", "cost"]
"""``short``: no boundary in the prompt. ``absent``: a full part of the first boundary is missing.
``window``: only window or state parts are missing. ``cost``: everything is there, but no hit would pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured on this machine. ``fetch_milliseconds_per_byte`` has every place, adoption into the row included;
    ``hit_milliseconds`` is what any hit costs."""

    prefill_milliseconds_per_token: float
    fetch_milliseconds_per_byte: Mapping[str, float]
    hit_milliseconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedFetch:
    """One part to fetch from ``place``."""

    block: int
    part: PartName
    place: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePlan:
    """The first ``tokens`` tokens are reused; 0 and no fetches if nothing is.

    ``missed_boundary`` is the longest boundary past ``tokens`` that lacked nothing but
    window or state parts: worth keeping when prefill comes by. ``declined_places`` are those
    that the longest hit needed which is not taken for its cost, less those of the one that is.
    """

    tokens: int
    reason: Reason
    fetches: tuple[PlannedFetch, ...] = ()
    saved_milliseconds: float = 0.0
    fetch_milliseconds: float = 0.0
    missed_boundary: int | None = None
    declined_places: frozenset[str] = frozenset()

    @property
    def size_bytes(self) -> int:
        """Bytes to reserve before anything is fetched."""
        return sum(fetch.size_bytes for fetch in self.fetches)


def plan_reuse(parts: PromptParts, where: Where, costs: Costs) -> ReusePlan:
    """The longest boundary of the prompt that can be reused and pays."""
    if not parts.boundaries:
        return ReusePlan(tokens=0, reason="short")
    full = _full_parts(parts.count(parts.boundaries[-1]), parts, where)
    reachable = [boundary for boundary in parts.boundaries if parts.count(boundary) <= len(full)]
    if not reachable:
        return ReusePlan(tokens=0, reason="absent")
    missed: int | None = None
    declined: frozenset[str] = frozenset()
    for boundary in reversed(reachable):
        tail = _fetches(parts.needs_at(boundary), parts, where)
        if tail is None:
            missed = missed or boundary
            continue
        fetches = (*(one for one in full[: parts.count(boundary)] if one is not None), *tail)
        spent = costs.hit_milliseconds + sum(
            one.size_bytes * costs.fetch_milliseconds_per_byte[one.place] for one in fetches
        )
        saved = boundary * costs.prefill_milliseconds_per_token
        if spent <= PAYING_SHARE * saved:
            return ReusePlan(
                tokens=boundary,
                reason="hit",
                fetches=fetches,
                saved_milliseconds=saved,
                fetch_milliseconds=spent,
                missed_boundary=missed,
                declined_places=declined - {one.place for one in fetches},
            )
        declined = declined or frozenset(one.place for one in fetches)
    reason: Reason = "cost" if declined else "window"
    return ReusePlan(tokens=0, reason=reason, missed_boundary=missed, declined_places=declined)


def _full_parts(blocks: int, parts: PromptParts, where: Where) -> list[PlannedFetch | None]:
    """For each block from the first on whose full part is there: what to fetch, None if it has no full part."""
    found: list[PlannedFetch | None] = []
    for block in range(blocks):
        if not parts.needs_full(block):
            found.append(None)
            continue
        fetches = _fetches(((block, "full"),), parts, where)
        if fetches is None:
            break
        found += fetches
    return found


def _fetches(
    needed: Sequence[tuple[int, PartName]], parts: PromptParts, where: Where
) -> list[PlannedFetch] | None:
    """What to fetch; None if anything is missing."""
    fetches = []
    for block, part in needed:
        place = where(block, part)
        if place is None:
            return None
        fetches.append(PlannedFetch(block, part, place, parts.part_bytes(block, part)))
    return fetches
