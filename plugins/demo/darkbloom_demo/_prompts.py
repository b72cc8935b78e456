"""Questions that every checkpoint of this package was seen to answer right, at temperature 0."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A user's single message, and a text that stands in every right answer."""

    question: str
    contains: str


def checked_prompts() -> tuple[CheckedPrompt, ...]:
    """All of them, in the order of the file."""
    file = Path(__file__).parent / "prompts.json"
    return tuple(CheckedPrompt(**entry) for entry in json.loads(file.read_text(encoding="utf-8")))
