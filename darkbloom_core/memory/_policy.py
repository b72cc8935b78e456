"""How much memory may be used: pure, saturating arithmetic in bytes, never negative."""

from __future__ import annotations

GIB = 1024**3

CAP_FRACTION = 0.90
OS_FLOOR_BYTES = 2 * GIB


def hard_cap(physical_bytes: int, fraction: float = CAP_FRACTION) -> int:
    """The most that all models together may use: ``min(trunc(fraction x physical), physical - 2 GiB)``."""
    return max(0, min(int(fraction * physical_bytes), physical_bytes - OS_FLOOR_BYTES))


def effective_cap(physical_bytes: int, operator_reserve_bytes: int, fraction: float = CAP_FRACTION) -> int:
    """The hard cap, or what the operator's reserve leaves if that is less."""
    return min(hard_cap(physical_bytes, fraction), max(0, physical_bytes - operator_reserve_bytes))


def kv_budget(effective_cap_bytes: int, weight_bytes: int, activation_bytes: int) -> int:
    """What the cap leaves for KV once all weights and the activation reserve are in memory."""
    return max(0, effective_cap_bytes - weight_bytes - activation_bytes)


def activation_reserve(effective_cap_bytes: int) -> int:
    """Bytes kept free for activations: 3 GiB, and on a small machine an eighth of the cap."""
    return min(3 * GIB, effective_cap_bytes // 8)
