"""How much memory may be used (pure policy), who holds it (the ledger), what the machine has (readings)."""

from darkbloom_core.memory._grants import WEIGHED_CONTEXT_TOKENS, KvDemand, kv_grants
from darkbloom_core.memory._ledger import Ledger
from darkbloom_core.memory._policy import (
    ACTIVATION_BYTES,
    CAP_FRACTION,
    MINIMUM_KV_BYTES,
    MOST_BYTES,
    activation_floor,
    activation_reserve,
    advertised_grant,
    cap_fraction,
    effective_cap,
    free_for_load,
    hard_cap,
    kv_budget,
    live_headroom,
    load_headroom,
    load_reserve,
    minimum_kv,
    required_to_load,
    serves_after_load,
    weight_estimate,
)
from darkbloom_core.memory._readings import physical_memory_bytes
from darkbloom_core.memory._terms import LoadCheck, MemoryTerms, Verdict

__all__ = [
    "ACTIVATION_BYTES",
    "CAP_FRACTION",
    "MINIMUM_KV_BYTES",
    "MOST_BYTES",
    "WEIGHED_CONTEXT_TOKENS",
    "KvDemand",
    "Ledger",
    "LoadCheck",
    "MemoryTerms",
    "Verdict",
    "activation_floor",
    "activation_reserve",
    "advertised_grant",
    "cap_fraction",
    "effective_cap",
    "free_for_load",
    "hard_cap",
    "kv_budget",
    "kv_grants",
    "live_headroom",
    "load_headroom",
    "load_reserve",
    "minimum_kv",
    "physical_memory_bytes",
    "required_to_load",
    "serves_after_load",
    "weight_estimate",
]
