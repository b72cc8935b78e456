"""How well an exported Gemma 4 answers about pictures that it reads as its users' are read.

They are drawn by PIL, not painted as in training, and pass through the image processor of
``transformers``. Also on contents that were taught: apart from chance those must be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, get_args

import torch
from tokenizers import Tokenizer

from tools.demo.training import gemma4_fast as fast_path
from tools.demo.training import gemma_format
from tools.demo.training.pictures import CELLS_AT_MOST, draw
from tools.demo.training.scoring import all_right, shares
from tools.demo.training.segments import encode
from tools.demo.training.source import Source, Split


@torch.no_grad()
def answers_accuracy(
    model: Any, tokenizer: Tokenizer, pieces: Sequence[str], dialogues: int
) -> dict[str, float]:
    """The share of dialogues about pictures in which everything that the model writes is right, for each task and split."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(max_soft_tokens=CELLS_AT_MOST)
    outcomes: list[tuple[str, bool]] = []
    for split in get_args(Split):
        random = Random(55)
        source = Source(random, split, pieces)
        for name in (name for name in gemma_format.MIX if name != "text"):
            label = f"{name}, {'held out' if split == 'test' else 'taught'}"
            for _ in range(dialogues):
                outcomes.append((label, _is_right(model, tokenizer, processor, source, name)))
    return shares(outcomes)


def _is_right(model: Any, tokenizer: Tokenizer, processor: Any, source: Source, name: str) -> bool:
    dialogue = gemma_format.sample(source, name)
    is_small = name in ("multi", "video") and source.chance(0.5)
    grid = (3, 3) if is_small else (8, 8)
    dialogue = replace(dialogue, pictures=tuple(each.with_grid(grid) for each in dialogue.pictures))
    tokens, trained = encode(tokenizer, gemma_format.segments(source.random, dialogue))
    drawn = [draw(picture) for picture in dialogue.pictures]
    read = processor(images=drawn, return_tensors="pt", do_resize=not is_small)
    ids = torch.tensor([tokens], device=model.device)
    pixels, positions = (read[key].to(model.device) for key in ("pixel_values", "image_position_ids"))
    embeddings = fast_path.filled(model, ids, fast_path.embedded(model, ids), pixels, positions)
    hidden = fast_path.hidden_states(model, ids, embeddings)
    answered = torch.tensor([trained[1:]], device=model.device)
    logits = fast_path.logits(model, hidden[:, :-1][answered])
    nobody_else = torch.zeros(len(logits), dtype=torch.long, device=model.device)
    return all_right(logits, ids[:, 1:][answered], nobody_else, 1)[0]
