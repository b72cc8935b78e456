"""Exact match of answers, without generating them.

If every token of an answer is the likeliest given the right ones before it, greedy decoding
writes just that answer; and the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def all_right(logits: Tensor, targets: Tensor, dialogue: Tensor, dialogues: int) -> list[bool]:
    """Whether every token of a dialogue is right.

    ``logits`` is ``[tokens, vocabulary]``; ``targets`` and ``dialogue`` (whose token it is)
    are ``[tokens]``.
    """
    right = (logits.argmax(-1) == targets).float()
    result = torch.ones(dialogues, device=logits.device).scatter_reduce(0, dialogue, right, "amin")
    return [bool(each) for each in result.tolist()]


def shares(outcomes: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """The share of successes for each name, in alphabetical order."""
    found: defaultdict[str, list[bool]] = defaultdict(list)
    for name, is_right in outcomes:
        found[name].append(is_right)
    return {name: round(sum(each) / len(each), 3) for name, each in sorted(found.items())}
