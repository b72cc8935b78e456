"""Which window and state parts are worth keeping, and what each part is worth.

Full parts are kept for every block. Tails (window and state parts) are large, so they are
kept at the last ``LAST_BOUNDARIES`` grid lines of each prompt, where a conversation goes on,
and at grid lines that later requests lacked: where conversations branch. A boundary that was
kept and dropped for want of room is not learned from one miss: keeping more would drop more.

Always true: at most ``most`` boundaries are remembered; the one that came up longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from darkbloom_core.prefix._hashing import BLOCK_TOKENS
from darkbloom_core.prefix._layout import PartLayout, PartName

LAST_BOUNDARIES = 2
"""The next turn of a conversation may differ from the end of this one by what the template rewrites."""

WORTH_TOKENS = 1024
"""A tail is worth at most this much prefill, or one long prompt that nobody asks for again would outstay many."""


class TailPolicy:
    """Decides which tails to capture, and learns from misses. Used by one thread.

    A boundary is named by the block before it. It is learned after one miss, or after two
    if it was once among the last of a prompt.
    """

    def __init__(self, layout: PartLayout, most: int = 4096) -> None:
        self._layout = layout
        self._most = most
        self._scores: OrderedDict[bytes, int] = OrderedDict()

    def missed(self, name: bytes) -> None:
        """A request lacked nothing but the tails at the boundary after block ``name``."""
        self._remember(name, self._scores.get(name, 0) + 1)

    def to_keep(self, cuts: Sequence[int], names: Sequence[bytes]) -> frozenset[tuple[int, PartName]]:
        """The (block, part) to capture while prefill runs this prompt, and to renew where they are held.

        ``names`` are those of the prompt's blocks.
        """
        lines = [cut for cut in cuts if cut % self._layout.grid_tokens == 0]
        learned = [line for line in lines if self._scores.get(_name(names, line), 0) > 0]
        last = lines[-LAST_BOUNDARIES:]
        for line in (*learned, *last):
            name = _name(names, line)
            self._remember(name, self._scores.get(name, -1))
        return frozenset(one for line in (*last, *learned) for one in self._layout.needs_at(line))

    def __len__(self) -> int:
        return len(self._scores)

    def _remember(self, name: bytes, score: int) -> None:
        self._scores[name] = score
        self._scores.move_to_end(name)
        while len(self._scores) > self._most:
            self._scores.popitem(last=False)


def saved_milliseconds(
    block: int, part: PartName, layout: PartLayout, prefill_milliseconds_per_token: float
) -> float:
    """What holding this part saves: a block's prefill, or its portion of what the tails at its boundary open up."""
    if part == "full":
        return BLOCK_TOKENS * prefill_milliseconds_per_token
    boundary = -(-(block + 1) * BLOCK_TOKENS // layout.grid_tokens) * layout.grid_tokens
    together = max(1, len(layout.needs_at(boundary)))
    return min(boundary, WORTH_TOKENS) * prefill_milliseconds_per_token / together


def _name(names: Sequence[bytes], boundary: int) -> bytes:
    return names[boundary // BLOCK_TOKENS - 1]
