"""A dialogue as text: what the model reads, and what it writes and is trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Segment:
    """``trained`` text is what the model writes, end token included."""

    text: str
    trained: bool


def encode(tokenizer: Tokenizer, segments: Iterable[Segment]) -> tuple[list[int], list[bool]]:
    """Token ids, and for each whether it is trained on."""
    ids: list[int] = []
    trained: list[bool] = []
    for segment in segments:
        tokens = tokenizer.encode(segment.text, add_special_tokens=False).ids
        ids += tokens
        trained += [segment.trained] * len(tokens)
    return ids, trained
