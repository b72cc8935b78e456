"""Which window and state parts are worth keeping, and what each part is worth.

Full parts are kept for every block. Tails (window and state parts) are large, so they are
kept at the last ``LAST_BOUNDARIES`` chunk ends of each prompt, where a conversation goes on,
and at those that later requests lacked: where conversations branch. A boundary that was
kept and dropped for want of room is not learned from one miss: keeping more would drop more.

Always true: at most ``most`` boundaries are remembered; the one that came up longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from darkbloom_core.prefix._hashing import BLOCK_TOKENS
from darkbloom_core.prefix._layout import PartName, PromptParts

LAST_BOUNDARIES = 2
"""The next turn of a conversation may differ from the end of this one by what the template rewrites.

Each is at least a block before the next one: pictures can bring two chunk ends close together.
"""

WORTH_TOKENS = 1024
"""A tail is worth at most this much prefill, or one long prompt that nobody asks for again would outstay many."""


class TailPolicy:
    """Decides which tails to capture, and learns from misses. Used by one thread.

    A boundary is named by the block before it. It is learned after one miss, or after two
    if it was once among the last of a prompt.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._scores: OrderedDict[bytes, int] = OrderedDict()

    def missed(self, name: bytes) -> None:
        """A request lacked nothing but the tails at the boundary after block ``name``."""
        self._remember(name, self._scores.get(name, 0) + 1)

    def to_keep(self, parts: PromptParts, names: Sequence[bytes]) -> frozenset[tuple[int, PartName]]:
        """The (block, part) to capture while prefill runs this prompt, and to renew where they are held.

        ``names`` are those of the prompt's blocks.
        """
        learned = [line for line in parts.lines if self._scores.get(_name(parts, names, line), 0) > 0]
        last = last_boundaries(parts.lines)
        for line in (*learned, *last):
            name = _name(parts, names, line)
            self._remember(name, self._scores.get(name, -1))
        return frozenset(one for line in (*last, *learned) for one in parts.needs_at(line))

    def __len__(self) -> int:
        return len(self._scores)

    def _remember(self, name: bytes, score: int) -> None:
        self._scores[name] = score
        self._scores.move_to_end(name)
        while len(self._scores) > self._most:
            self._scores.popitem(last=False)


def last_boundaries(lines: Sequence[int]) -> list[int]:
    """The last of ``lines``, ascending, at which every prompt's tails are kept."""
    found: list[int] = []
    for line in reversed(lines):
        if len(found) < LAST_BOUNDARIES and (not found or line <= found[0] - BLOCK_TOKENS):
            found.insert(0, line)
    return found


def saved_milliseconds(
    block: int, part: PartName, parts: PromptParts, prefill_milliseconds_per_token: float
) -> float:
    """What holding this part saves: a block's prefill, or its portion of what the tails at its boundary open up."""
    held = parts.blocks[block]
    if part == "full":
        return (held.end - held.start) * prefill_milliseconds_per_token
    together = max(1, len(parts.needs_at(held.chunk_end)))
    return min(held.chunk_end, WORTH_TOKENS) * prefill_milliseconds_per_token / together


def _name(parts: PromptParts, names: Sequence[bytes], line: int) -> bytes:
    return names[parts.count(line) - 1]
