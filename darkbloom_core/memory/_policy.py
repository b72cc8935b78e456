"""How much memory may be used: pure arithmetic in bytes.

Always true: what goes in is held between 0 and 2**64 - 1, and so is what comes out; nothing
raises and nothing is ever negative. docs/memory.md explains each term.
"""

from __future__ import annotations

import math

GIB = 1024**3
MOST_BYTES = 2**64 - 1
"""Where everything saturates; also what stands for "not known, so no limit"."""

CAP_FRACTION = 0.90
SYSTEM_FLOOR_BYTES = 2 * GIB
ACTIVATION_BYTES = 3 * GIB
MINIMUM_KV_BYTES = GIB
WEIGHT_FACTOR = 1.2
"""How much more than their bytes on disk weights may take while they load."""

SMALL_CAP_BYTES = 6 * GIB
"""Below this cap (that of a machine of 8 GiB) activations and minimum KV are scaled down in proportion."""

SMALL_MODEL_FACTOR = 16
"""Neither is ever more than this many times the weights they are for, so that tiny models need little."""


def cap_fraction(given: float | str | None) -> float:
    """``given`` as the share of physical memory that may be used.

    Nothing, what is no number, what is not finite, 0 and less mean ``CAP_FRACTION``; more
    than 1 means 1.
    """
    try:
        fraction = float(given) if given is not None else CAP_FRACTION
    except ValueError:
        return CAP_FRACTION
    return min(fraction, 1.0) if math.isfinite(fraction) and fraction > 0 else CAP_FRACTION


def hard_cap(physical_bytes: int, fraction: float = CAP_FRACTION) -> int:
    """The most that all models together may use: ``min(trunc(fraction x physical), physical - 2 GiB)``.

    ``fraction`` is held between 0 and 1; if it is not finite it is ``CAP_FRACTION``.
    """
    physical = _held(physical_bytes)
    share = min(max(fraction, 0.0), 1.0) if math.isfinite(fraction) else CAP_FRACTION
    return min(_held(int(share * physical)), _less(physical, SYSTEM_FLOOR_BYTES))


def effective_cap(physical_bytes: int, operator_reserve_bytes: int, fraction: float = CAP_FRACTION) -> int:
    """The hard cap, or what the operator's reserve leaves if that is less."""
    return min(hard_cap(physical_bytes, fraction), _less(physical_bytes, operator_reserve_bytes))


def activation_floor(hard_cap_bytes: int, weight_bytes: int | None = None) -> int:
    """Bytes kept free for activations: 3 GiB.

    Half the cap where that is less (a cap below 6 GiB), and 16 times the weights of all
    models if they are given and that is less.
    """
    return _scaled(ACTIVATION_BYTES, hard_cap_bytes, weight_bytes)


def activation_reserve(
    hard_cap_bytes: int,
    weight_bytes: int | None = None,
    *,
    configured_bytes: int = 0,
    measured_bytes: int = 0,
) -> int:
    """``activation_floor``, or what the operator configured (0 and less mean nothing); never less than measured."""
    floor = _held(configured_bytes) or activation_floor(hard_cap_bytes, weight_bytes)
    return max(floor, _held(measured_bytes))


def minimum_kv(hard_cap_bytes: int, weight_bytes: int | None = None) -> int:
    """The least KV grant that is worth serving a model with: 1 GiB.

    A sixth of the cap where that is less (a cap below 6 GiB), and 16 times the model's
    weights if they are given and that is less.
    """
    return _scaled(MINIMUM_KV_BYTES, hard_cap_bytes, weight_bytes)


def weight_estimate(disk_bytes: int, memory_per_disk_byte: float = 1.0) -> int:
    """What weights of ``disk_bytes`` may take: x 1.2, and x what the family says that a byte becomes."""
    return _held(int(min(_held(disk_bytes) * WEIGHT_FACTOR * max(0.0, memory_per_disk_byte), MOST_BYTES)))


def load_reserve(physical_bytes: int, operator_reserve_bytes: int, fraction: float = CAP_FRACTION) -> int:
    """What a load must leave alone: the operator's reserve, or what the cap leaves if that is more."""
    cap = hard_cap(physical_bytes, fraction)
    return max(_held(operator_reserve_bytes), _less(physical_bytes, cap))


def load_headroom(activation_bytes: int, minimum_kv_bytes: int = MINIMUM_KV_BYTES) -> int:
    """What must be left beside a model's weights so that it can serve."""
    return _sum(activation_bytes, minimum_kv_bytes)


def required_to_load(weight_bytes: int, headroom_bytes: int) -> int:
    """What must be free before weights estimated at ``weight_bytes`` are loaded."""
    return _sum(weight_bytes, headroom_bytes)


def free_for_load(
    physical_bytes: int,
    used_bytes: int,
    system_free_bytes: int | None,
    *,
    load_reserve_bytes: int,
    outstanding_bytes: int = 0,
) -> int:
    """What a load may take. ``used`` is the allocator's active and cached memory.

    ``system_free_bytes`` is None where nothing says how much the machine has left.
    ``outstanding_bytes`` are reserved but not allocated yet.
    """
    free = min(_less(physical_bytes, used_bytes), _known(system_free_bytes))
    return _less(free, _sum(load_reserve_bytes, outstanding_bytes))


def kv_budget(effective_cap_bytes: int, weight_bytes: int, activation_bytes: int) -> int:
    """What the cap leaves for KV once all weights and the activation reserve are in memory."""
    return _less(effective_cap_bytes, _sum(weight_bytes, activation_bytes))


def live_headroom(
    effective_cap_bytes: int, used_bytes: int, system_free_bytes: int | None, activation_bytes: int
) -> int:
    """What may still be allocated now, by the cap and by what the machine has left, activations apart."""
    free = min(_less(effective_cap_bytes, used_bytes), _known(system_free_bytes))
    return _less(free, activation_bytes)


def serves_after_load(
    live_headroom_bytes: int, outstanding_bytes: int, minimum_kv_bytes: int = MINIMUM_KV_BYTES
) -> bool:
    """Whether the headroom measured after a load still holds the minimum KV and all that is reserved."""
    return _held(live_headroom_bytes) >= _sum(minimum_kv_bytes, outstanding_bytes)


def advertised_grant(grant_bytes: int, kv_budget_bytes: int, others_grants_bytes: int) -> int:
    """What a slot may say that it can reserve: its grant, or what the others leave of the budget if that is less."""
    return min(_held(grant_bytes), _less(kv_budget_bytes, others_grants_bytes))


def _scaled(full_bytes: int, hard_cap_bytes: int, weight_bytes: int | None) -> int:
    of_cap = _held(hard_cap_bytes) // (SMALL_CAP_BYTES // full_bytes)
    of_weights = _known(None if weight_bytes is None else SMALL_MODEL_FACTOR * _held(weight_bytes))
    return min(full_bytes, of_cap, of_weights)


def _held(value: int) -> int:
    return min(max(0, value), MOST_BYTES)


def _sum(first: int, second: int) -> int:
    return _held(_held(first) + _held(second))


def _less(from_bytes: int, less_bytes: int) -> int:
    return max(0, _held(from_bytes) - _held(less_bytes))


def _known(value: int | None) -> int:
    return MOST_BYTES if value is None else _held(value)
