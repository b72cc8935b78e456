"""One request for an answer in plain values, whatever API it came through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from darkbloom_core.contracts import Chat, MediaKind, MediaPart
from darkbloom_core.engine import SamplingParams
from darkbloom_core.media import MediaSource

Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOverrides:
    """What the client said about sampling; None where it said nothing and the checkpoint's default holds."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    logprobs: int | None = None

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """``defaults`` with what the client said laid over them."""
        said = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        return replace(defaults, **said)


@dataclass(frozen=True, slots=True)
class AskedMedia(MediaPart):
    """A picture or a video as the client sent it, before anybody has looked at it."""

    source: MediaSource = field(kw_only=True)


def asked_media(kind: Literal["image", "video"], uri: str, where: str) -> AskedMedia:
    """The part of a message for a picture or a video; ``where`` names the field that it came in."""
    return AskedMedia(kind, (), source=MediaSource(kind, uri, where))


def asked_in(chat: Chat) -> Iterator[AskedMedia]:
    """All pictures and videos of a conversation, in order."""
    for message in chat.messages:
        for part in message.content:
            if isinstance(part, AskedMedia):
                yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """What to generate. ``source`` is a conversation to continue, or plain text.

    ``max_tokens`` None means as many as the settings and the context allow. ``choices``
    answers are generated, each a sequence of its own, all from the same seed. Only requests
    of the same ``cache_key`` share what was computed for their prompts.
    """

    model: str
    source: Chat | str
    max_tokens: int | None = None
    sampling: SamplingOverrides = SamplingOverrides()
    stop: tuple[str, ...] = ()
    choices: int = 1
    streamed: bool = False
    include_usage: bool = False
    cache_key: str | None = None

    @property
    def operation(self) -> Operation:
        return "chat" if isinstance(self.source, Chat) else "text_completion"

    @property
    def media_kind(self) -> MediaKind | None:
        """What the model is to see."""
        kinds = {one.kind for one in asked_in(self.source)} if isinstance(self.source, Chat) else set()
        return "mixed" if len(kinds) > 1 else next(iter(kinds), None)
