"""Whether an output, written with control tokens by name, fits what a codec says outputs must be."""

from __future__ import annotations

import re

from darkbloom_core.grammar import GrammarCompiler


class Fits:
    """``names`` are the control tokens of ``codec``: name to id."""

    def __init__(self, codec, names) -> None:
        self._codec, self._names = codec, names
        self._compiler = GrammarCompiler(codec)
        self._cut = re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})")

    def tokens(self, output: str) -> list[int]:
        tokens: list[int] = []
        for piece in self._cut.split(output):
            tokens += [self._names[piece]] if piece in self._names else self._codec.encode_text(piece)
        return tokens

    def __call__(self, chat, output: str) -> bool:
        """True if ``output`` is taken whole and nothing may follow."""
        constraint = self._compiler.compile(self._codec.grammar(chat)).constraint()
        for token in self.tokens(output):
            mask = constraint.allowed()
            if constraint.complete or not mask[token // 8] >> token % 8 & 1:
                return False
            constraint.accept(token)
        return constraint.complete
