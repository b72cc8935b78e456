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

    def activation_reserve(self, weight_bytes: int | None = None) -> int:
        """Bytes kept free for activations beside models whose weights together take ``weight_bytes``."""
        return policy.activation_reserve(
            self.hard_cap_bytes,
            weight_bytes,
            configured_bytes=self.activation_bytes,
            measured_bytes=self.measured_activation_bytes,
        )

    def minimum_kv(self, weight_bytes: int | None = None) -> int:
        """The least KV grant that is worth serving a model of ``weight_bytes`` with."""
        return policy.minimum_kv(self.hard_cap_bytes, weight_bytes)

    def load_headroom(self, weight_bytes: int | None = None, loaded_weight_bytes: int = 0) -> int:
        """What must be left beside a model of ``weight_bytes``, with ``loaded_weight_bytes`` of others loaded."""
        together = None if weight_bytes is None else weight_bytes + loaded_weight_bytes
        return policy.load_headroom(self.activation_reserve(together), self.minimum_kv(weight_bytes))

    def check_load(
        self,
        weight_bytes: int | None,
        *,
        used_bytes: int | None,
        system_free_bytes: int | None = None,
        outstanding_bytes: int = 0,
        loaded_weight_bytes: int = 0,
    ) -> LoadCheck:
        """Whether weights estimated at ``weight_bytes`` may be loaded now; ``policy`` explains the terms."""
        required = free = None
        if weight_bytes is not None:
            headroom = self.load_headroom(weight_bytes, loaded_weight_bytes)
            required = policy.required_to_load(weight_bytes, headroom)
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
        return policy.kv_budget(self.effective_cap_bytes, weight_bytes, self.activation_reserve(weight_bytes))

    def live_headroom(
        self, used_bytes: int, system_free_bytes: int | None = None, weight_bytes: int | None = None
    ) -> int:
        """What may still be allocated now beside models whose weights together take ``weight_bytes``."""
        return policy.live_headroom(
            self.effective_cap_bytes, used_bytes, system_free_bytes, self.activation_reserve(weight_bytes)
        )

    def serves_after_load(
        self, live_headroom_bytes: int, outstanding_bytes: int, weight_bytes: int | None = None
    ) -> bool:
        """Whether ``live_headroom_bytes``, measured after a model was loaded, hold its minimum KV and what is reserved."""
        return policy.serves_after_load(live_headroom_bytes, outstanding_bytes, self.minimum_kv(weight_bytes))

    def grants(self, budget_bytes: int, demands: Sequence[KvDemand]) -> tuple[int, ...] | None:
        """The KV grants of models side by side; None if one of them would be below its minimum."""
        grants = kv_grants(budget_bytes, demands)
        enough = (
            grant >= self.minimum_kv(demand.weight_bytes)
            for grant, demand in zip(grants, demands, strict=True)
        )
        return grants if all(enough) else None
