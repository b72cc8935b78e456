"""How the KV budget is divided among models: each gets its grant in proportion to what a full context costs it.

Pure. Always true: the grants never add up to more than the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from darkbloom_core.memory._policy import MOST_BYTES

WEIGHED_CONTEXT_TOKENS = 131_072
"""A longer context than this weighs no more; an unknown one weighs as much."""


@dataclass(frozen=True, slots=True)
class KvDemand:
    """What one model's KV costs: bytes per token once its windows are full, and how long its context is.

    ``weight_bytes`` are the model's own weights, if known: a tiny model may have a tiny grant.
    """

    bytes_per_token: int
    context_tokens: int
    weight_bytes: int | None = None

    @property
    def weight(self) -> int:
        """``bytes_per_token x min(context, 131072)``; 0 if the rate is not known."""
        context = self.context_tokens if self.context_tokens > 0 else WEIGHED_CONTEXT_TOKENS
        return max(0, self.bytes_per_token) * min(context, WEIGHED_CONTEXT_TOKENS)


def kv_grants(budget_bytes: int, demands: Sequence[KvDemand]) -> tuple[int, ...]:
    """The grant of each of ``demands``, in their order; what rounding leaves stays unassigned.

    One model gets everything. If any rate is unknown, or the weights are too large to
    compare, all get the same.
    """
    budget = min(max(0, budget_bytes), MOST_BYTES)
    if len(demands) <= 1:
        return (budget,) * len(demands)
    weights = [demand.weight for demand in demands]
    total = sum(weights)
    if min(weights) == 0 or total > MOST_BYTES:
        return (budget // len(demands),) * len(demands)
    grants = [int(budget * (weight / total)) for weight in weights]
    excess = sum(grants) - budget
    if excess > 0:
        largest = grants.index(max(grants))
        grants[largest] -= excess
    return tuple(grants)
