"""How much memory may be used (pure policy), who holds it (the ledger), what the machine has (readings)."""

from darkbloom_core.memory._ledger import Ledger
from darkbloom_core.memory._policy import activation_reserve, effective_cap, hard_cap, kv_budget
from darkbloom_core.memory._readings import physical_memory_bytes

__all__ = [
    "Ledger",
    "activation_reserve",
    "effective_cap",
    "hard_cap",
    "kv_budget",
    "physical_memory_bytes",
]
