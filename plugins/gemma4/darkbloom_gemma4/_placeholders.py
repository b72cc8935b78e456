"""Where pictures stand in a prompt: the template's one placeholder becomes as many soft tokens as the picture has.

A picture is ``<|image>``, its soft tokens, ``<image|>``; a video is a picture for each frame
with its time as mm:ss before it, as the publisher's processor writes them. Pictures in the
result of a tool stand right after it. Always true: pictures come in the order of the
request, or there is an ``InvalidRequest``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from darkbloom_core.checkpoint import TextTokenizer
from darkbloom_core.contracts import MediaPart, MediaSpan, Message, TextPart
from darkbloom_core.errors import InvalidRequest
from darkbloom_gemma4._tokens import (
    BEGIN_OF_IMAGE,
    END_OF_IMAGE,
    END_OF_RESPONSE,
    IMAGE,
    VIDEO,
)

_PLACES = re.compile("|".join(map(re.escape, (IMAGE, VIDEO, END_OF_RESPONSE))))


def has_media(messages: Sequence[Message]) -> bool:
    """Whether there is anything to see."""
    return any(isinstance(part, MediaPart) for message in messages for part in message.content)


def template_content(message: Message) -> str | list[dict[str, Any]]:
    """What the template is given of a user's message: text alone, or the parts in their order."""
    if not has_media((message,)):
        return message.text
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.kind}
        for part in message.content
    ]


class Placeholders:
    """The placeholders of one conversation. Raises ``CheckpointError`` if the tokenizer has no such tokens."""

    def __init__(self, tokenizer: TextTokenizer, messages: Sequence[Message]) -> None:
        self._tokenizer = tokenizer
        self._video = VIDEO if tokenizer.control_id(VIDEO) is not None else IMAGE
        self._expected = list(_places(messages))
        parts = [part for _, some in self._expected for part in some]
        self._lengths = [length for part in parts for length in part.soft_tokens]

    def expand(self, text: str) -> str:
        """``text``, as the template rendered it, with every soft token in its place."""
        expected = iter(self._expected)

        def fill(found: re.Match[str]) -> str:
            place, parts = next(expected, ("", ()))
            if place != found[0]:
                raise _no_place()
            written = "".join(map(self._written, parts))
            return found[0] + written if place == END_OF_RESPONSE else written

        text = _PLACES.sub(fill, text)
        if next(expected, None) is not None:
            raise _no_place()
        return text

    def spans(self, ids: Sequence[int]) -> tuple[MediaSpan, ...]:
        """Where each picture's soft tokens stand in ``ids``."""
        spans = tuple(self._runs(ids))
        if [span.length for span in spans] != self._lengths:
            raise _no_place()
        return spans

    def _written(self, part: MediaPart) -> str:
        token = self._video if part.kind == "video" else IMAGE
        pictures = [f"{BEGIN_OF_IMAGE}{token * length}{END_OF_IMAGE}" for length in part.soft_tokens]
        if part.kind == "image":
            return "".join(pictures)
        times = [f"{int(second) // 60:02d}:{int(second) % 60:02d}" for second in part.seconds]
        return " ".join(f"{time} {picture}" for time, picture in zip(times, pictures, strict=True))

    def _runs(self, ids: Sequence[int]) -> Iterator[MediaSpan]:
        begin, end = (self._tokenizer.require_control_id(name) for name in (BEGIN_OF_IMAGE, END_OF_IMAGE))
        starts = [place + 1 for place, token in enumerate(ids) if token == begin]
        for picture, start in enumerate(starts):
            yield MediaSpan(start, ids.index(end, start) - start, picture)


def _places(messages: Sequence[Message]) -> Iterator[tuple[str, tuple[MediaPart, ...]]]:
    """What the template writes for each picture of a user and for each result of a tool, and what belongs there."""
    for message in messages:
        media = tuple(part for part in message.content if isinstance(part, MediaPart))
        if message.role == "tool":
            yield END_OF_RESPONSE, media
        else:
            yield from ((VIDEO if part.kind == "video" else IMAGE, (part,)) for part in media)


def _no_place() -> InvalidRequest:
    return InvalidRequest(
        "the model's chat template has no place for the pictures of this conversation", param="messages"
    )
