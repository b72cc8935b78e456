"""The memory terms of one machine: what the loader, the doctor and the planner all ask, so that they agree.

Pure: the readings of the machine are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from darkbloom_core.memory import _policy as policy
from darkbloom_core.memory._grants import KvDemand, kv_grants

Verdict = Literal["fits", "does not fit", "unknown"]


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """What a load needs and what it may take; None where something was not known."""

    required_bytes: int | None
    free_bytes: int | None

    @property
    def verdict(self) -> Verdict:
        if self.required_bytes is None or self.free_bytes is None:
            return "unknown"
        return "fits" if self.required_bytes <= self.free_bytes else "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """``physical_bytes`` is what the machine (or its accelerator, or its container) has at all.

    ``activation_bytes`` is the operator's own activation reserve, 0 for the computed one;
    ``measured_activation_bytes`` what warm-up found so far, over all loaded models.
    """

    physical_bytes: int
    operator_reserve_bytes: int = 0
    fraction: float = policy.CAP_FRACTION
    activation_bytes: int = 0
    measured_activation_bytes: int = 0

    @property
    def hard_cap_bytes(self) -> int:
        return policy.hard_cap(self.physical_bytes, self.fraction)

    @property
    def effective_cap_bytes(self) -> int:
        return policy.effective_cap(self.physical_bytes, self.operator_reserve_bytes, self.fraction)

    @property
    def load_reserve_bytes(self) -> int:
        return policy.load_reserve(self.physical_bytes, self.operator_reserve_bytes, self.fraction)

    @property
    def activation_reserve_bytes(self) -> int:
        return policy.activation_reserve(
            self.hard_cap_bytes,
            configured_bytes=self.activation_bytes,
            measured_bytes=self.measured_activation_bytes,
        )

    @property
    def minimum_kv_bytes(self) -> int:
        return policy.minimum_kv(self.hard_cap_bytes)

    @property
    def load_headroom_bytes(self) -> int:
        return policy.load_headroom(self.activation_reserve_bytes, self.minimum_kv_bytes)

    def check_load(
        self,
        weight_bytes: int | None,
        *,
        used_bytes: int | None,
        system_free_bytes: int | None = None,
        outstanding_bytes: int = 0,
    ) -> LoadCheck:
        """Whether weights estimated at ``weight_bytes`` may be loaded now; ``policy`` explains the terms."""
        required = free = None
        if weight_bytes is not None:
            required = policy.required_to_load(weight_bytes, self.load_headroom_bytes)
        if used_bytes is not None and self.physical_bytes > 0:
            free = policy.free_for_load(
                self.physical_bytes,
                used_bytes,
                system_free_bytes,
                load_reserve_bytes=self.load_reserve_bytes,
                outstanding_bytes=outstanding_bytes,
            )
        return LoadCheck(required, free)

    def kv_budget(self, weight_bytes: int) -> int:
        """KV bytes for all models whose weights together take ``weight_bytes``."""
        return policy.kv_budget(self.effective_cap_bytes, weight_bytes, self.activation_reserve_bytes)

    def live_headroom(self, used_bytes: int, system_free_bytes: int | None = None) -> int:
        """What may still be allocated now."""
        return policy.live_headroom(
            self.effective_cap_bytes, used_bytes, system_free_bytes, self.activation_reserve_bytes
        )

    def serves_after_load(self, live_headroom_bytes: int, outstanding_bytes: int) -> bool:
        """Whether ``live_headroom_bytes``, measured after a load, still hold the minimum KV and all reservations."""
        return policy.serves_after_load(live_headroom_bytes, outstanding_bytes, self.minimum_kv_bytes)

    def grants(self, budget_bytes: int, demands: Sequence[KvDemand]) -> tuple[int, ...] | None:
        """The KV grants of models side by side; None if one of them would be below the minimum."""
        grants = kv_grants(budget_bytes, demands)
        return grants if all(grant >= self.minimum_kv_bytes for grant in grants) else None
