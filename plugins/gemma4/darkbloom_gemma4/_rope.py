"""Rotary embedding: the periods of a head's pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from darkbloom_gemma4._rotary import Rotary


def periods(rotary: Rotary, head_dim: int) -> NDArray[np.float32]:
    """``[head_dim / 2]``: positions in which a pair turns by one radian; infinite for pairs that do not turn.

    Pair ``i`` holds elements ``i`` and ``i + head_dim / 2``. The frequency of pair ``i`` is
    ``theta ** (-2 i / head_dim) / factor`` for the first ``fraction`` of the pairs and 0 for
    the others: "proportional" rotary embedding, of which the plain one is the case of
    fraction 1. Computed in float32, as the reference does.
    """
    turning = int(rotary.fraction * head_dim // 2)
    exponents = np.arange(0, 2 * turning, 2, dtype=np.float32) / np.float32(head_dim)
    result = np.full(head_dim // 2, np.inf, np.float32)
    result[:turning] = np.float32(rotary.theta) ** exponents * np.float32(rotary.factor)
    return result
