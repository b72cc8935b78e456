"""Trains one checkpoint for a given time and writes it as a folder that ``transformers`` reads."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.demo.training.export import export, stored_tensors
from tools.demo.training.loader import load
from tools.demo.training.optimizer import Optimizer
from tools.demo.training.padded import NOT_TRAINED
from tools.demo.training.recipe import Recipe
from tools.demo.training.runner import Batch, Runner
from tools.demo.training.schedule import Schedule

log = logging.getLogger(__name__)

GPU_WORKERS = 14
CAPTURE_SECONDS = 60.0
"""How long to wait for batches of every shape before the clock starts; later ones are captured when they come."""
REPORT_SECONDS = 15.0
SMOOTHING = 0.2


@dataclass(slots=True)
class Report:
    """What a run did. ``loss`` is that of each shape of batch, smoothed."""

    recipe: str
    parameters: int
    device: str
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    trained_tokens: int = 0
    pictures: int = 0
    loss: dict[str, float] = field(default_factory=dict)

    def count(self, batch: Batch) -> None:
        ids, labels = batch[0], batch[1]
        self.steps += 1
        self.tokens += ids.numel()
        self.trained_tokens += int((labels != NOT_TRAINED).sum())
        self.pictures += len(batch[3]) if len(batch) > 3 else 0

    def smooth(self, batch: Batch, loss: float) -> None:
        shape = "x".join(map(str, batch[0].shape))
        self.loss[shape] = (1 - SMOOTHING) * self.loss.get(shape, loss) + SMOOTHING * loss


def train(recipe: Recipe, seconds: float, folder: Path, *, steps: int | None = None) -> Report:
    """Train for ``seconds``, or for ``steps`` if that is less, and write the checkpoint and a report."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    batches = load(recipe.batches, recipe.loader_seed, GPU_WORKERS if device.type == "cuda" else 0)
    model = recipe.new_model().to(device)
    report = Report(recipe.name, sum(each.numel() for each in model.parameters()), str(device))
    log.info("%s: %d parameters on %s", recipe.name, report.parameters, device)
    with recipe.fast(model):
        optimizer = Optimizer(model, recipe.uses_muon, recipe.learning_rate)

        def forward(*batch: Tensor) -> tuple[Tensor, Tensor]:
            return recipe.losses(model, *batch)

        runner = Runner(forward, optimizer, device)
        if device.type == "cuda":
            _capture(recipe, batches, runner)
        _run(batches, runner, optimizer, Schedule(seconds), report, steps)
    _save(recipe, model, report, folder)
    return report


def _capture(recipe: Recipe, batches: Iterator[Batch], runner: Runner) -> None:
    """Meet every shape of batch once, without moving the weights, before the clock starts."""
    start = time.monotonic()
    seen: set[tuple[torch.Size, ...]] = set()
    while len(seen) < recipe.shapes and time.monotonic() - start < CAPTURE_SECONDS:
        batch = next(batches)
        shapes = tuple(each.shape for each in batch)
        if shapes not in seen:
            seen.add(shapes)
            runner.step(batch, 0.0)
    log.info("%d of %d shapes captured in %.1f s", len(seen), recipe.shapes, time.monotonic() - start)


def _run(
    batches: Iterator[Batch],
    runner: Runner,
    optimizer: Optimizer,
    schedule: Schedule,
    report: Report,
    steps: int | None,
) -> None:
    reported = 0.0
    while not schedule.is_over and (steps is None or report.steps < steps):
        batch = next(batches)
        runner.step(batch, schedule.next_factor())
        report.count(batch)
        if report.steps % 20 == 0:  # reading a loss waits for the GPU
            report.smooth(batch, runner.loss.item())
        if schedule.elapsed_seconds - reported > REPORT_SECONDS:
            reported = schedule.elapsed_seconds
            log.info(
                "%.0f s, step %d, %.1f M tokens, balance %.3f, gradient norm %.2f, loss %s",
                reported,
                report.steps,
                report.tokens / 1e6,
                runner.balance.item(),
                optimizer.norm.item(),
                {shape: round(loss, 4) for shape, loss in sorted(report.loss.items())},
            )
    report.seconds = round(schedule.elapsed_seconds, 1)


def _save(recipe: Recipe, model: Any, report: Report, folder: Path) -> None:
    export(recipe, stored_tensors(model), folder)
    (folder / "training.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    log.info("%s: %d steps in %.1f s, written to %s", recipe.name, report.steps, report.seconds, folder)
