"""The tokens that give Gemma 4's text its structure."""

from __future__ import annotations

from pathlib import Path

from darkbloom_core.checkpoint import TextTokenizer

END_OF_SEQUENCE, TURN, END_OF_TURN = "<eos>", "<|turn>", "<turn|>"
CHANNEL, END_OF_CHANNEL, THINK = "<|channel>", "<channel|>", "<|think|>"
TOOL, END_OF_TOOL = "<|tool>", "<tool|>"
CALL, END_OF_CALL = "<|tool_call>", "<tool_call|>"
RESPONSE, END_OF_RESPONSE = "<|tool_response>", "<tool_response|>"
BEGIN_OF_IMAGE, IMAGE, END_OF_IMAGE, VIDEO = "<|image>", "<|image|>", "<image|>", "<|video|>"
QUOTE = '<|"|>'

CONTROL_NAMES = frozenset(
    {END_OF_SEQUENCE, TURN, END_OF_TURN, CHANNEL, END_OF_CHANNEL, THINK, TOOL, END_OF_TOOL, CALL, END_OF_CALL}
    | {RESPONSE, END_OF_RESPONSE, QUOTE, BEGIN_OF_IMAGE, IMAGE, END_OF_IMAGE, VIDEO}
)
"""Control tokens even where a tokenizer does not mark them as special."""

STOP_NAMES = (END_OF_TURN, END_OF_SEQUENCE)


def read_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of the checkpoint folder ``path``."""
    return TextTokenizer(path, control_names=CONTROL_NAMES)
