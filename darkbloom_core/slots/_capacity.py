"""What each slot can take, as a fleet's scheduler wants to know it; the numbers that admission itself goes by.

Always true: what is advertised follows every change of the shares, and what is used is the
worst case that was promised, not what happens to be allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

from darkbloom_core.contracts import SlotActivity
from darkbloom_core.memory import advertised_grant
from darkbloom_core.slots._memory import SlotMemory
from darkbloom_core.slots._slot import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCapacity:
    """One slot. Token budgets count KV of one token at the model's rate; 0 where the rate is not known.

    ``token_budget`` is what all requests together may hold, ``committed_tokens`` the worst
    case of those that run or wait, ``active_tokens`` what they hold now.
    """

    model: str
    activity: SlotActivity
    running: int
    waiting: int
    max_rows: int
    active_tokens: int
    committed_tokens: int
    token_budget: int
    kv_bytes_per_token: int
    prefill_rate: float | None
    decode_rate: float | None
    load_seconds: float | None


def slot_capacity(slot: Slot, memory: SlotMemory, others_grants_bytes: int) -> SlotCapacity:
    """``others_grants_bytes`` are the grants of all other slots together."""
    status, rate = slot.engine.status(), slot.description.kv_bytes_per_token
    grant = advertised_grant(slot.grant_bytes, memory.budget(), others_grants_bytes)
    return SlotCapacity(
        model=slot.name,
        activity=slot.activity,
        running=status.running,
        waiting=status.waiting,
        max_rows=status.max_rows,
        active_tokens=status.active_tokens,
        committed_tokens=status.committed_tokens,
        token_budget=max(0, grant - slot.slab_bytes) // rate if rate > 0 else 0,
        kv_bytes_per_token=rate,
        prefill_rate=status.prefill_rate,
        decode_rate=status.decode_rate,
        load_seconds=slot.load_seconds,
    )
