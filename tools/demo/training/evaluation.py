"""Judges an exported checkpoint: the share of answers that are exactly right."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from tools.demo.training.recipe import Recipe

log = logging.getLogger(__name__)


def evaluate(recipe: Recipe, folder: Path, *, dialogues: int, answers: int) -> dict[str, dict[str, float]]:
    """Accuracies by task, the fast way and (unless ``answers`` is 0) as users run the model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family = type(recipe.new_model())
    model = family.from_pretrained(folder, dtype=torch.float32, attn_implementation=recipe.attention)
    model = model.to(device).eval()
    found: dict[str, dict[str, float]] = {}
    if answers:
        start = time.monotonic()
        found["answers"] = recipe.answers_accuracy(model, answers)
        _show(f"as users run it, {answers} dialogues of each task", found["answers"], start)
    start = time.monotonic()
    with recipe.fast(model):
        found["held_out"] = recipe.held_out_accuracy(model, device, dialogues)
    _show(f"every token the likeliest, {dialogues} held-out dialogues of each task", found["held_out"], start)
    return found


def _show(title: str, accuracies: dict[str, float], start: float) -> None:
    log.info("%s (%.0f s):", title, time.monotonic() - start)
    for name, accuracy in accuracies.items():
        log.info("  %-32s %.3f", name, accuracy)
