"""Requests in flight that have a beginning in common: one computes it, the others wait for it and take it over.

No arrays, no clock, no cache: the engine says what happens, and asks who waits.

Always true: whoever waits, waits for one that does not wait itself, for a boundary that it
has not computed yet and of which it will keep every part; when that one ends, or a part of
it could not be kept, nobody waits for it any longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from darkbloom_core.prefix._layout import PartName, PromptParts


@dataclass(slots=True, eq=False)
class _Leader:
    names: Mapping[int, bytes]  # of the block before each line
    done: int
    keeps: set[tuple[int, PartName]]
    shares: bool = True


class PrefillSharing:
    """Of one model. Used by the engine's thread; requests are told apart by their ids."""

    def __init__(self) -> None:
        self._leaders: dict[str, _Leader] = {}
        self._waiting: dict[str, tuple[str, int]] = {}

    def enter(
        self,
        request: str,
        names: Sequence[bytes],
        parts: PromptParts,
        start: int,
        tails: Iterable[tuple[int, PartName]],
    ) -> int | None:
        """``request`` is about to run its prefill from token ``start`` on.

        Gives the boundary that it should wait for, since another request is on the way
        there, or None if it should go on at once. It is asked again, with what is reusable
        then, when it need not wait any more (``waits``). ``names`` are those of its blocks,
        ``parts`` theirs, ``tails`` what it is going to keep.
        """
        self.leave(request)
        best: tuple[int, str] | None = None
        for other, leader in self._leaders.items():
            boundary = self._meeting(leader, names, parts, start)
            if boundary is not None and (best is None or boundary > best[0]):
                best = (boundary, other)
        if best is not None:
            boundary, other = best
            self._leaders[other].keeps.update(parts.needs_at(boundary))
            self._waiting[request] = (other, boundary)
            return boundary
        named = {line: names[parts.count(line) - 1] for line in parts.lines}
        self._leaders[request] = _Leader(named, start, set(tails))
        return None

    def tails(self, request: str) -> frozenset[tuple[int, PartName]]:
        """What ``request`` has to keep while it runs: its own, and what those need that wait for it."""
        leader = self._leaders.get(request)
        return frozenset() if leader is None else frozenset(leader.keeps)

    def computed(self, request: str, boundary: int, *, is_kept: bool) -> None:
        """``request`` is done up to ``boundary``; ``is_kept`` says whether all that it had to keep is there."""
        leader = self._leaders.get(request)
        if leader is None:
            return
        leader.done = boundary
        leader.shares = leader.shares and is_kept

    def waits(self, request: str) -> bool:
        """Whether ``request`` should still wait; if not, plan again and ``enter`` again."""
        return self.awaited(request) is not None

    def awaited(self, request: str) -> str | None:
        """The one that ``request`` should still wait for."""
        other, boundary = self._waiting.get(request, ("", 0))
        leader = self._leaders.get(other)
        if leader is None or not leader.shares or leader.done >= boundary:
            return None
        return other

    def leave(self, request: str) -> None:
        """``request`` has finished its prefill, or ended in whatever way. Idempotent."""
        self._leaders.pop(request, None)
        self._waiting.pop(request, None)

    @property
    def is_empty(self) -> bool:
        return not self._leaders and not self._waiting

    def _meeting(self, leader: _Leader, names: Sequence[bytes], parts: PromptParts, start: int) -> int | None:
        """The last boundary of the newcomer that ``leader`` will compute and can still keep all parts of."""
        if start > leader.done or not leader.shares:
            return None
        for boundary in reversed(parts.boundaries):
            if boundary <= leader.done:
                return None
            if leader.names.get(boundary) == names[parts.count(boundary) - 1]:
                needed = parts.needs_at(boundary)
                if all(one in leader.keeps or parts.blocks[one[0]].start >= leader.done for one in needed):
                    return boundary
        return None
