"""What `darkbloom models plan` prints. Importing this imports MLX."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.cli._examine import examine
from darkbloom_core.cli._format import byte_text, count_text
from darkbloom_core.cli._places import model_places
from darkbloom_core.memory import MachineReadings
from darkbloom_core.settings import Settings
from darkbloom_core.slots import PlannedModel, current_device, plan_models


def print_plan(command: CommandContext, settings: Settings, words: Sequence[str], *, as_json: bool) -> None:
    """Plan what ``words`` name on this machine as it is now, and print it. Raises ``SetupError``."""
    places, device = model_places(command, settings), current_device()
    models = [examine(command, word, places, device) for word in dict.fromkeys(words)]
    named = [(model.name, model.path, model.description) for model in models]
    plans = plan_models(settings, MachineReadings().read("device"), named)
    if as_json:
        typer.echo(json.dumps([_facts(plan) for plan in plans], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "weights", "KV memory", "tokens"):
        table.add_column(heading, overflow="fold")
    for plan in plans:
        grant, tokens = byte_text(plan.grant_bytes), count_text(plan.token_budget)
        given = (grant, tokens) if plan.refusal is None else ("refused", "")
        table.add_row(plan.name, byte_text(plan.weight_bytes), *given)
    Console(highlight=False).print(table)
    for plan in plans:
        if plan.refusal is not None:
            typer.echo(f"{plan.name}: {plan.refusal.code}: {plan.refusal.message}")


def _facts(plan: PlannedModel) -> dict[str, object]:
    return {
        "model": plan.name,
        "weight_bytes": plan.weight_bytes,
        "load_bytes": plan.load_bytes,
        "required_bytes": plan.check.required_bytes,
        "free_bytes": plan.check.free_bytes,
        "grant_bytes": plan.grant_bytes,
        "slab_bytes": plan.slab_bytes,
        "token_budget": plan.token_budget,
        "refusal": None if plan.refusal is None else plan.refusal.code,
    }
