"""How a family is talked to: messages in, typed deltas out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal, Protocol, TypeAlias

from darkbloom_core.contracts._grammar import AnswerFormat, Grammar, JsonText
from darkbloom_core.contracts._vision import MediaSpan


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A picture or a video. ``soft_tokens`` has one entry per picture: 1 image, or a video's frames.

    ``seconds`` has the timestamp of each frame of a video. The pixels stay with the
    request; the codec only places the placeholders.
    """

    kind: Literal["image", "video"]
    soft_tokens: tuple[int, ...]
    seconds: tuple[float, ...] = ()


Part: TypeAlias = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made in an earlier turn. ``arguments`` is parsed JSON."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. ``content`` is empty where the client sent null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: tuple[Part, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. ``parameters`` is a JSON schema.

    ``origin`` is the field of the request that the schema came in, for errors.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    origin: str = "tools"


ToolChoice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to continue, and what the client asked of the answer.

    ``named_tool`` goes with ``tool_choice="required"``: only that tool. ``reasoning_effort``
    is the client's word, None if it said nothing. ``answer`` is what the text of the answer
    must be, None for any text. ``today`` is for families that tell the model the date.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    named_tool: str | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    answer: AnswerFormat | None = None
    today: date | None = None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.named_tool in (None, tool.name))

    @property
    def is_constrained(self) -> bool:
        """Whether not every output would be an answer to this, so that ``ChatCodec.grammar`` is needed."""
        strict = any(tool.strict for tool in self.callable_tools)
        return self.answer is not None or self.tool_choice == "required" or strict

    def arguments_of(self, tool: Tool) -> JsonText:
        """What the arguments of a call of ``tool`` must be: its schema, as far as can be if it is not strict."""
        return JsonText({"type": "object", **tool.parameters}, tool.origin, lenient=not tool.strict)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and where pictures stand in them, in order."""

    ids: tuple[int, ...]
    spans: tuple[MediaSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text that the model thinks aloud before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the ``index``-th tool call: its name in the first piece, JSON text in any."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Malformed:
    """The output broke its format; what was there is shown as text by the deltas around this.

    ``reason`` is a short fixed phrase (it is counted in telemetry), never output text.
    """

    reason: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta | Malformed


class OutputParser(Protocol):
    """Turns one output into typed deltas, as it arrives. Made anew for every output.

    It never raises on anything that a model may write, and never drops text.
    """

    def control(self, token: int) -> Sequence[Delta]:
        """A control token (one of ``ChatCodec.control_ids``) was produced."""
        ...

    def text(self, text: str) -> Sequence[Delta]:
        """Ordinary text was produced; any cut of the same text gives the same fold of deltas."""
        ...

    def finish(self) -> Sequence[Delta]:
        """The output ended; return what was held back."""
        ...


class ChatCodec(Protocol):
    """Text of one checkpoint: its tokenizer, its chat template, its output format. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows are below this."""
        ...

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that are structure, not text: never produced from a client's text, never shown."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes (perhaps of a part of a character) that ``token`` stands for.

        Empty for control tokens and unknown ids.
        """
        ...

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Plain text to ids, as the publisher's tokenizer does, except that no control token comes of it."""
        ...

    def encode_chat(self, chat: Chat) -> Prompt:
        """Render ``chat`` with the checkpoint's own template, up to where the model answers.

        Raises ``InvalidRequest`` if the format has no place for something in it.
        """
        ...

    def grammar(self, chat: Chat) -> Grammar | None:
        """What a whole output must be to answer ``chat``; None if any output would do.

        It covers
        everything from after the prompt to the control token that ends the output, thoughts
        included. Raises ``InvalidRequest`` for what the family cannot be kept to.
        """
        ...

    def parser(self, chat: Chat) -> OutputParser:
        """A parser for one answer to ``chat``."""
        ...
