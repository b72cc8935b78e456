"""Shows that the fast path of training computes what ``transformers`` computes, with random weights."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from tools.demo.training import gemma4_fast, gemma_format
from tools.demo.training.gemma4 import Gemma4Recipe
from tools.demo.training.gpt_oss import GptOssRecipe
from tools.demo.training.gpt_oss_fast import hidden_states
from tools.demo.training.painting import paint, patch_positions
from tools.demo.training.pictures import draw, pack
from tools.demo.training.segments import encode
from tools.demo.training.source import Source

TOLERANCE = 1e-4
"""Of the largest logit, in float32."""


@torch.no_grad()
def check_gpt_oss(recipe: GptOssRecipe) -> dict[str, float]:
    """The largest difference of logits, relative to the largest logit."""
    model: Any = recipe.new_model().eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name or "bias" in name:
            parameter.normal_(std=0.5)
        elif parameter.ndim > 1:
            parameter.normal_(std=0.06)
    ids = torch.randint(5, 1200, (2, 300))
    stock = model(ids).logits
    with recipe.fast(model):
        ours = model.lm_head(hidden_states(model, ids))
    return {"text": _difference(ours, stock)}


@torch.no_grad()
def check_gemma4(recipe: Gemma4Recipe) -> dict[str, float]:
    """The same for pictures of one prompt, for several, and for a video; and for both ways to embed pictures."""
    model: Any = recipe.new_model().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.08)
    random = Random(5)
    source = Source(random, "test", recipe.pieces)
    found = {}
    for name in ("two", "multi", "video"):
        dialogue = gemma_format.sample(source, name)
        pictures = tuple(replace(each, noise=0, grid=(8, 8)) for each in dialogue.pictures)
        dialogue = replace(dialogue, pictures=pictures)
        ids = torch.tensor([encode(recipe.tokenizer, gemma_format.segments(random, dialogue))[0]])
        numbers = torch.from_numpy(np.stack([pack(picture) for picture in pictures]))
        positions = patch_positions(numbers)
        pixels = paint(numbers, positions)
        stock = model(**_stock_inputs(ids, pixels, positions, is_video=dialogue.is_video)).logits
        with recipe.fast(model):
            embeddings = gemma4_fast.embedded(model, ids)
            for way, filled in (
                ("as in evaluation", gemma4_fast.filled(model, ids, embeddings, pixels, positions)),
                ("as in training", _filled_by_index(model, ids, embeddings, pixels, positions)),
            ):
                hidden = gemma4_fast.hidden_states(model, ids, filled)
                found[f"{name}, {way}"] = _difference(gemma4_fast.logits(model, hidden), stock)
    return found


def painting_error(recipe: Gemma4Recipe) -> float:
    """The mean difference of a pixel, of 1, between painting and PIL with the image processor: edges differ a little."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    random = Random(6)
    source = Source(random, "train", recipe.pieces)
    scenes = [gemma_format.sample(source, "two").pictures[0] for _ in range(20)]
    pictures = [replace(each, noise=0, grid=(8, 8)) for each in scenes]
    numbers = torch.from_numpy(np.stack([pack(picture) for picture in pictures]))
    positions = patch_positions(numbers)
    read = Gemma4ImageProcessorPil(max_soft_tokens=70)(
        images=[draw(picture) for picture in pictures], return_tensors="pt"
    )
    if not torch.equal(read["image_position_ids"][:, : positions.shape[1]], positions):
        raise ValueError("the image processor lays patches out in another way")
    pixels = read["pixel_values"][:, : positions.shape[1]]
    return float((paint(numbers, positions) - pixels).abs().mean())


def _filled_by_index(
    model: Any, ids: Tensor, embeddings: Tensor, pixels: Tensor, positions: Tensor
) -> Tensor:
    seen = gemma4_fast.features(model, pixels, positions)
    is_soft = gemma4_fast.is_soft_token(ids)
    index = torch.zeros_like(ids)
    index[is_soft] = torch.arange(int(is_soft.sum()))
    return torch.where(is_soft[..., None], seen[index], embeddings)


def _stock_inputs(ids: Tensor, pixels: Tensor, positions: Tensor, *, is_video: bool) -> dict[str, Any]:
    kinds = torch.zeros_like(ids)
    kinds[ids == gemma_format.ID["<|image|>"]] = 1
    kinds[ids == gemma_format.ID["<|video|>"]] = 2
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds}
    if not is_video:
        return {**inputs, "pixel_values": pixels, "image_position_ids": positions}
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < (5, 24):  # one video more in the shape, instead of the number of frames
        return {**inputs, "pixel_values_videos": pixels[None], "video_position_ids": positions[None]}
    frames = torch.tensor([len(pixels)])
    return {
        **inputs,
        "pixel_values_videos": pixels,
        "video_position_ids": positions,
        "num_frames_per_video": frames,
    }


def _difference(ours: Tensor, stock: Tensor) -> float:
    return float((ours - stock).abs().max() / stock.abs().max())
