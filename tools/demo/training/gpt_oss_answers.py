"""How well an exported GPT-OSS answers: greedy generation by ``transformers``, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from tools.demo.training import harmony
from tools.demo.training.scoring import shares
from tools.demo.training.segments import Segment
from tools.demo.training.source import Source

BATCH = 25
SECRETS = (40, 110)
"""Sentences of the texts in which secrets are asked for besides the usual ones."""


def answers_accuracy(
    model: Any, tokenizer: Tokenizer, pieces: Sequence[str], dialogues: int
) -> dict[str, float]:
    """The share of held-out dialogues of each task in which everything that the model writes is right.

    After a wrong answer the dialogue goes on with the right one, but counts as failed.
    """
    random = Random(123)
    source = Source(random, "test", pieces)
    jobs: list[tuple[str, int | None]] = [(name, None) for name in harmony.MIX]
    jobs += [("secret", sentences) for sentences in SECRETS]
    outcomes: list[tuple[str, bool]] = []
    for name, sentences in jobs:
        samples = [harmony.sample(source, name, sentences=sentences) for _ in range(dialogues)]
        written = [harmony.segments(random, sample) for sample in samples]
        label = name if sentences is None else f"{name} in {sentences} sentences"
        outcomes += [(label, each) for each in _right(model, tokenizer, written)]
    return shares(outcomes)


def _right(model: Any, tokenizer: Tokenizer, dialogues: Sequence[Sequence[Segment]]) -> list[bool]:
    def encoded(segment: Segment) -> list[int]:
        ids: list[int] = tokenizer.encode(segment.text, add_special_tokens=False).ids
        return ids

    right = [True] * len(dialogues)
    contexts: list[list[int]] = [[] for _ in dialogues]
    for turn in range(0, max(map(len, dialogues)), 2):
        asked = [index for index, segments in enumerate(dialogues) if turn < len(segments)]
        for index in asked:
            contexts[index] += encoded(dialogues[index][turn])
        wanted = {index: encoded(dialogues[index][turn + 1]) for index in asked}
        asked.sort(key=lambda index: len(contexts[index]))
        for start in range(0, len(asked), BATCH):
            part = asked[start : start + BATCH]
            longest = max(len(wanted[index]) for index in part)
            answers = _generate(model, [contexts[index] for index in part], longest + 8)
            for index, answer in zip(part, answers, strict=True):
                right[index] &= answer == wanted[index]
        for index in asked:
            contexts[index] += wanted[index]
    return right


@torch.no_grad()
def _generate(model: Any, prompts: Sequence[Sequence[int]], most_tokens: int) -> list[list[int]]:
    """Greedy answers, each up to and with its end token. Prompts are padded on the left."""
    config = model.generation_config
    longest = max(map(len, prompts))
    ids = [[config.pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    generated = model.generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=most_tokens,
        do_sample=False,
    )
    answers = []
    for row in generated[:, longest:].tolist():
        end = next((place for place, token in enumerate(row) if token in config.eos_token_id), len(row) - 1)
        answers.append(row[: end + 1])
    return answers
