"""Turns trained tensors into a folder in the layout that ``transformers`` writes, in bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.demo.training.recipe import Recipe

TENSORS = "trained.safetensors"
"""The tensors as trained, so that another version of ``transformers`` can write the folder anew."""


def stored_tensors(model: Any) -> dict[str, Tensor]:
    """Every tensor of ``model`` once, on the CPU, in bfloat16. A tied head is its embedding."""
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return {
        name: tensor.detach().to(torch.bfloat16).contiguous().cpu()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def export(recipe: Recipe, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the checkpoint, and ``tensors`` beside it as they are.

    Raises ``ValueError`` if they are not those of the recipe's model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, {"format": "pt"})
    model = recipe.new_model()
    missing, unexpected = model.load_state_dict(
        {name: tensor.float() for name, tensor in tensors.items()}, strict=False
    )
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"not the tensors of {recipe.name}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = recipe.generation_config()
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(recipe.folder / name, folder / name)
    write_json(folder / "tokenizer_config.json", dict(recipe.tokenizer_config))
    recipe.write_extras(folder)


def export_again(recipe: Recipe, tensors: Path, folder: Path) -> None:
    """Write the checkpoint from the tensors that an earlier export kept."""
    export(recipe, load_file(tensors), folder)


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
