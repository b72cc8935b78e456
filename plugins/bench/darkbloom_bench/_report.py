"""Shows cells: a table for people, a list for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from darkbloom_bench._machine import Machine
from darkbloom_bench._measure import Cell


def show(cells: Sequence[Cell], peer: str | None, console: Console) -> None:
    """Print a table, one line for each cell, and below it what was noted."""
    table = Table(box=None, pad_edge=False)
    table.add_column("workload")
    table.add_column("rows", justify="right")
    table.add_column("figure", overflow="fold")
    table.add_column("darkbloom", justify="right")
    if peer is not None:
        table.add_column(peer, justify="right")
        table.add_column("ratio", justify="right")
    table.add_column("unit")
    table.add_column("better")
    last = None
    for cell in cells:
        same, last = cell.workload == last, cell.workload
        compared = [] if peer is None else [_number(cell.peer), _number(cell.ratio, 3)]
        table.add_row(
            "" if same else cell.workload,
            "" if same else str(cell.rows),
            cell.metric,
            _number(cell.ours),
            *compared,
            cell.unit,
            cell.better,
        )
    console.print(table)
    for note in dict.fromkeys(f"{cell.workload}: {cell.note}" for cell in cells if cell.note):
        console.print(note, markup=False)


def as_json(cells: Sequence[Cell], model: str, machine: Machine, repeats: int) -> str:
    """A list of cells, each with the model and the machine, so that lists of several runs can be joined."""
    common = {"model": model, "machine": str(machine), "repeats": repeats}
    return json.dumps([{**asdict(cell), **common} for cell in cells], indent=2)


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
