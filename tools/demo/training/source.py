"""What every generator draws from: randomness, a split, and words.

Always true: a held-out prompt never occurs in training. Which contents are held out is
decided by a hash of the content, so it needs no list and never changes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, TypeVar

from tools.demo.training.words import HELD_OUT_WORDS, WORDS

Split = Literal["train", "test"]
T = TypeVar("T")

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
"""Pieces to invent words from while there is no tokenizer yet."""

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def word_pieces(tokenizer_files: Iterable[Path]) -> tuple[str, ...]:
    """The short alphabetic tokens of the tokenizers.

    Words invented from them make every token something that had to be copied once.
    """
    tokens: set[str] = set()
    for file in tokenizer_files:
        tokens |= json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"].keys()
    pieces = {token.lstrip("\u0120\u2581").lower() for token in tokens}
    return tuple(sorted(piece for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) <= 4))


def is_held_out(content: object, one_in: int = 8) -> bool:
    """Whether ``content`` belongs to the test split; one content in ``one_in`` does."""
    return zlib.crc32(repr(content).encode()) % one_in == 0


@dataclass(frozen=True, slots=True)
class Source:
    """Randomness and words for one split. ``pieces`` are what invented words are made of."""

    random: Random
    split: Split
    pieces: Sequence[str]

    def choice(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, draw: Callable[[], T], one_in: int = 8) -> T:
        """Draw until the content belongs to this split."""
        while True:
            content = draw()
            if is_held_out(content, one_in) == (self.split == "test"):
                return content

    def word(self) -> str:
        """A word to copy: a known one or, in 40 % of cases, an invented one; in tests sometimes a held-out one."""
        if self.split == "test" and self.chance(0.3):
            return self.choice(HELD_OUT_WORDS)
        draw = self.random.random()
        if draw < 0.15:
            return self._syllables()
        return self._pieces_joined() if draw < 0.4 else self.choice(WORDS)

    def proper_name(self, known: Sequence[str]) -> str:
        """One of ``known`` or, in 40 % of cases, an invented one, so that names are learnt as copying."""
        draw = self.random.random()
        if draw < 0.4:
            return (self._syllables() if draw < 0.15 else self._pieces_joined()).capitalize()
        return self.choice(known)

    def _syllables(self) -> str:
        count = self.random.randint(2, 3)
        syllables = "".join(self.choice(_CONSONANTS) + self.choice(_VOWELS) for _ in range(count))
        return syllables + self.choice(["", "", "n", "r", "s"])

    def _pieces_joined(self) -> str:
        return "".join(self.choice(self.pieces) for _ in range(self.random.randint(1, 3)))[:9]
