"""Harmony output to typed deltas, as it arrives.

A message is ``header <|message|> body <|end|>``; a header has sections: role, channel,
content type. The prompt ends inside the first header, after its role. Always true:
nothing raises, nothing is dropped but a header's own words, and any cut of the same text
gives the same fold of deltas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from darkbloom_core.contracts import ContentDelta, Delta, Malformed, ReasoningDelta, ToolCallDelta

START, MESSAGE, CHANNEL, CONSTRAIN = "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"
END, CALL, RETURN, END_OF_TEXT = "<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"
CONTROL_NAMES = (START, MESSAGE, CHANNEL, CONSTRAIN, END, CALL, RETURN, END_OF_TEXT)

Section = Literal["role", "channel", "type"]

_CHANNELS = ("analysis", "commentary", "final")
_CONTENT_TYPES = ("json", "code", "text")
_WORDS: Mapping[Section, tuple[str, ...]] = {
    "role": ("assistant",),
    "channel": (*_CHANNELS, *_CONTENT_TYPES),
    "type": _CONTENT_TYPES,
}
_RECIPIENT = "to="
_NOBODY = ("assistant", "user", "all")
_FUNCTIONS = "functions."
_HEADER_CHARACTERS_LIMIT = 512


class _Kind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass(slots=True)
class _Header:
    """A header so far: its sections with their text, as they came; one may come again."""

    parts: list[tuple[Section, str]] = field(default_factory=lambda: [("role", "")])

    @property
    def section(self) -> Section:
        return self.parts[-1][0]

    def add(self, text: str) -> None:
        section, before = self.parts[-1]
        self.parts[-1] = section, before + text

    def enter(self, section: Section) -> None:
        self.parts.append((section, " " if self.has(section) else ""))

    def has(self, section: Section) -> bool:
        return any(each == section for each, _ in self.parts)

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.parts)

    @property
    def complete(self) -> bool:
        """Whether every word is a header's own, and there are not too many of them."""
        return self._is_short and all(_is_own(section, word) for section, word in self._words())

    @property
    def plausible(self) -> bool:
        """Whether every word is, or may still become, a header's own. Once false it stays false."""
        section, text = self.parts[-1]
        earlier = self._words()
        unfinished = earlier.pop()[1] if text[-1:].strip() else ""
        beginnings = (*_WORDS[section], _RECIPIENT)
        return (self._is_short and all(_is_own(*word) for word in earlier)) and (
            unfinished.startswith(_RECIPIENT) or any(word.startswith(unfinished) for word in beginnings)
        )

    @property
    def _is_short(self) -> bool:
        return len(self.text) <= _HEADER_CHARACTERS_LIMIT

    @property
    def channel(self) -> str | None:
        """The first word of its section, if it is a channel."""
        words = [word for section, word in self._words() if section == "channel"]
        return words[0] if words and words[0] in _CHANNELS else None

    @property
    def recipient(self) -> str | None:
        """Whom the message is to, if that is not just the other side of the conversation."""
        named = [word.removeprefix(_RECIPIENT) for _, word in self._words() if word.startswith(_RECIPIENT)]
        return named[-1] if named and named[-1] not in _NOBODY else None

    def _words(self) -> list[tuple[Section, str]]:
        return [(section, word) for section, text in self.parts for word in text.split()]


def _is_own(section: Section, word: str) -> bool:
    return word in _WORDS[section] or word.startswith(_RECIPIENT)


class HarmonyParser:
    """One output's ``OutputParser``. ``names`` are the control tokens; ``tools`` the functions that were offered."""

    def __init__(self, names: Mapping[int, str], tools: frozenset[str]) -> None:
        self._names = names
        self._tools = tools
        self._header: _Header | None = _Header()  # a header, a body, or neither: between messages
        self._given_up: _Header | None = None  # a header that was shown as text, until its message opens
        self._body: _Kind | None = None
        self._body_is_new = True
        self._shown: set[_Kind] = set()
        self._calls = 0
        self._arguments = ""

    def control(self, token: int) -> Sequence[Delta]:
        match self._names.get(token):
            case "<|start|>":
                return self._start_header()
            case "<|channel|>":
                return self._enter_section("channel")
            case "<|constrain|>" if self._header is not None:
                return self._enter_section("type")
            case "<|message|>" if self._header is not None:
                return self._open_message(self._header)
            case "<|message|>" if self._given_up is not None:
                self._open_body(_kind_of(self._given_up))
                return []
            case "<|end|>" if self._header is not None or self._body is not None:
                return self._end_message()
            case "<|call|>" | "<|return|>" | "<|endoftext|>":
                return self._end_message()
            case _:
                return [Malformed("unexpected control token")]

    def text(self, text: str) -> Sequence[Delta]:
        if self._header is not None:
            self._header.add(text)
            return [] if self._header.plausible else self._recover("text without a message header")
        if self._body is not None:
            return self._show(text)
        text = text.lstrip()
        if not text:
            return []
        self._open_body(_Kind.CONTENT)
        return [Malformed("text between messages"), *self._show(text)]

    def finish(self) -> Sequence[Delta]:
        """An output may be cut off anywhere, so the beginning of a channel's name is no text."""
        if self._header is None or self._header.section != "role" or self._header.complete:
            return []
        return self._recover("text without a message header")

    def _start_header(self) -> list[Delta]:
        deltas = self._recover("message without a body")
        if self._body is not None:
            deltas += [*self._close_body(), Malformed("message without an end")]
        self._header = _Header()
        return deltas

    def _enter_section(self, section: Section) -> list[Delta]:
        deltas: list[Delta] = []
        if self._header is None:
            deltas = [*self._close_body(), Malformed("message without a start")]
            self._header = _Header()
        elif not self._header.complete:
            deltas = [*self._recover("text without a message header"), *self._close_body()]
            self._header = _Header()
        elif self._header.has(section):
            deltas = [Malformed("repeated header section")]
        self._header.enter(section)
        return deltas

    def _open_message(self, header: _Header) -> list[Delta]:
        deltas: list[Delta] = []
        if not header.complete:
            deltas = [*self._recover("unknown message header"), *self._close_body()]
        elif header.channel is None and header.recipient is None:
            deltas = [Malformed("message without a channel")]
        self._header = None
        if header.recipient is not None:
            name = header.recipient.removeprefix(_FUNCTIONS)
            if name in self._tools or (self._tools and name and header.recipient != name):
                self._open_body(_Kind.CALL)
                self._calls += 1
                self._arguments = ""
                return [*deltas, ToolCallDelta(self._calls - 1, name=name)]
            deltas.append(Malformed("call of a tool that was not offered"))
        self._open_body(_kind_of(header))
        return deltas

    def _end_message(self) -> list[Delta]:
        return [*self._recover("message without a body"), *self._close_body()]

    def _recover(self, reason: str) -> list[Delta]:
        """Give up the header, if there is one. What is in it is shown, unless it is all a header's own."""
        header, self._header = self._header, None
        if header is None or not header.text.strip():
            return []
        if header.complete:
            return [Malformed(reason)]
        self._open_body(_Kind.CONTENT)
        self._given_up = header
        return [Malformed(reason), *self._show(header.text)]

    def _open_body(self, kind: _Kind) -> None:
        self._body = kind
        self._body_is_new = True
        self._given_up = None

    def _close_body(self) -> list[Delta]:
        kind, self._body = self._body, None
        self._given_up = None
        if kind is _Kind.CALL and not _is_json_object(self._arguments):
            return [Malformed("tool arguments are not JSON")]
        return []

    def _show(self, text: str) -> list[Delta]:
        """``text`` of the open body. Shown texts of one kind from several messages have a line break between them."""
        if not text:
            return []
        if self._body is _Kind.CALL:
            self._arguments += text
            return [ToolCallDelta(self._calls - 1, arguments=text)]
        kind = _Kind.CONTENT if self._body is None else self._body
        if self._body_is_new and kind in self._shown:
            text = "\n" + text
        self._body_is_new = False
        self._shown.add(kind)
        return [ReasoningDelta(text) if kind is _Kind.REASONING else ContentDelta(text)]


def _kind_of(header: _Header) -> _Kind:
    return _Kind.REASONING if header.channel == "analysis" else _Kind.CONTENT


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
