"""What loading some models together would give each, before any of them is loaded.

Pure but for the sizes of files: the readings of the machine are passed in. Always true: it
goes by the loader's own arithmetic, so that it refuses what the loader refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from darkbloom_core.contracts import ModelDescription
from darkbloom_core.engine import planned_slab_bytes
from darkbloom_core.errors import CapacityExhausted, DarkbloomError, ModelDoesNotFit, NoSlotFree
from darkbloom_core.memory import KvDemand, LoadCheck, Reading, kv_grants
from darkbloom_core.settings import Settings
from darkbloom_core.slots._memory import check_grants, check_load, kv_budget, memory_terms
from darkbloom_core.slots._weights import estimated_weight_bytes, expected_weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """One model of a plan. ``weight_bytes`` are expected in memory, ``load_bytes`` at most while it loads.

    ``refusal`` is the error with which the loader would refuse it beside those before it,
    None if it would be loaded; a refused model has no grant. ``slab_bytes`` of the grant are
    allocated whatever runs, the rest holds ``token_budget`` tokens of all requests together.
    """

    name: str
    description: ModelDescription
    weight_bytes: int
    load_bytes: int
    check: LoadCheck
    refusal: DarkbloomError | None = None
    grant_bytes: int = 0
    slab_bytes: int = 0

    @property
    def token_budget(self) -> int:
        rate = self.description.kv_bytes_per_token
        return max(0, self.grant_bytes - self.slab_bytes) // rate if rate > 0 else 0

    @property
    def demand(self) -> KvDemand:
        """What its KV costs, for the division of KV memory."""
        return KvDemand(
            self.description.kv_bytes_per_token, self.description.context_tokens, self.weight_bytes
        )


def check_checkpoint(
    settings: Settings, found: Reading, path: Path, description: ModelDescription
) -> LoadCheck:
    """The loader's verdict on the checkpoint at ``path``, beside what ``found`` says is in use."""
    terms = memory_terms(settings.memory, found.physical_bytes)
    return check_load(terms, found, estimated_weight_bytes(path, description) or None)


def plan_models(
    settings: Settings, found: Reading, models: Sequence[tuple[str, Path, ModelDescription]]
) -> tuple[PlannedModel, ...]:
    """Load ``models`` (name, folder, description) on paper, in their order, evicting nothing.

    A model for which there is no room is passed over. What warm-up will measure beyond the
    activation reserve is not known here; it lowers real grants.
    """
    loaded: list[PlannedModel] = []
    refused: dict[str, PlannedModel] = {}
    for name, path, description in models:
        plan = PlannedModel(
            name=name,
            description=description,
            weight_bytes=expected_weight_bytes(path, description),
            load_bytes=estimated_weight_bytes(path, description),
            check=LoadCheck(None, None),
        )
        plan = replace(plan, check=_check(settings, _with(found, loaded), plan, loaded))
        try:
            loaded = _load(settings, found, plan, loaded)
        except DarkbloomError as error:
            refused[name] = replace(plan, refusal=error)
    served = {plan.name: plan for plan in loaded}
    return tuple(refused.get(name) or served[name] for name, _, _ in models)


def _check(
    settings: Settings, found: Reading, plan: PlannedModel, loaded: Sequence[PlannedModel]
) -> LoadCheck:
    terms = memory_terms(settings.memory, found.physical_bytes)
    return check_load(terms, found, plan.load_bytes, loaded_weight_bytes=_weights(loaded))


def _load(
    settings: Settings, found: Reading, plan: PlannedModel, loaded: Sequence[PlannedModel]
) -> list[PlannedModel]:
    """All with their grants once ``plan`` is loaded too. Raises what the loader raises."""
    if len(loaded) >= settings.slots.max_models:
        raise NoSlotFree(f"slots.max_models is {settings.slots.max_models}")
    if plan.check.verdict != "fits":
        raise ModelDoesNotFit(
            f"needs {plan.check.required_bytes} bytes to load; {plan.check.free_bytes} may be taken"
        )
    together = [*loaded, plan]
    terms = memory_terms(settings.memory, found.physical_bytes)
    grants = kv_grants(
        kv_budget(settings.memory, terms, _weights(together)), [each.demand for each in together]
    )
    check_grants(settings.memory, terms, together, grants)
    shared = [replace(each, grant_bytes=grant) for each, grant in zip(together, grants, strict=True)]
    now = _with(found, [*loaded, plan])
    slabs = planned_slab_bytes(plan.description.layers, grants[-1], settings.max_rows_of(plan.name))
    if slabs is None or slabs > terms.live_headroom(now.used_bytes, now.free_bytes, _weights(together)):
        raise CapacityExhausted("no room for the KV cache of one row")
    return [*shared[:-1], replace(shared[-1], slab_bytes=slabs)]


def _with(found: Reading, loaded: Sequence[PlannedModel]) -> Reading:
    """The readings once ``loaded`` are in memory, with their slabs."""
    taken = sum(each.weight_bytes + each.slab_bytes for each in loaded)
    free = None if found.free_bytes is None else max(0, found.free_bytes - taken)
    return replace(found, used_bytes=found.used_bytes + taken, free_bytes=free)


def _weights(models: Sequence[PlannedModel]) -> int:
    return sum(each.weight_bytes for each in models)
