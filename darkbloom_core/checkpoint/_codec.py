"""The half of a ``ChatCodec`` that is the same in every family: what its tokenizer says."""

from __future__ import annotations

from darkbloom_core.checkpoint._tokenizer import TextTokenizer


class TokenizerCodec:
    """A base for a family's codec, which adds its format: ``encode_chat``, ``grammar`` and ``parser``.

    Thread-safe, as ``tokenizer`` is.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows are below this."""
        return self.tokenizer.vocab_size

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of the control tokens."""
        return self.tokenizer.control_ids

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that ``token`` stands for; empty for control tokens and unknown ids."""
        return self.tokenizer.token_bytes(token)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """``text`` to ids, all of it as ordinary text."""
        return self.tokenizer.encode_text(text)
