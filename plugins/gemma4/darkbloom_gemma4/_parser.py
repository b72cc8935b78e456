"""Gemma 4 output to typed deltas, as it arrives.

An output is text, thinking (``<|channel>thought``, a line break, text, a line break,
``<channel|>``) and tool calls (``<|tool_call>`` ... ``<tool_call|>``), in any order.
Always true: nothing raises, nothing is dropped but the format's own words, and any cut of
the same text gives the same fold of deltas. A tool call appears whole, when it ends: until
then nobody can know that it is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto

from darkbloom_core.contracts import ContentDelta, Delta, Malformed, ReasoningDelta, ToolCallDelta
from darkbloom_gemma4 import _tokens as tokens
from darkbloom_gemma4._calls import parse_calls

_THOUGHT = "thought"
_HEADER_CHARACTERS_LIMIT = 32


class _State(Enum):
    CONTENT = auto()
    HEADER = auto()  # after <|channel>, up to the line break
    REASONING = auto()
    CALL = auto()


class Gemma4Parser:
    """One output's ``OutputParser``. ``names`` are the control tokens, ``tools`` the functions that were offered."""

    def __init__(self, names: Mapping[int, str], tools: frozenset[str]) -> None:
        self._names = names
        self._tools = tools
        self._state = _State.CONTENT
        self._header = ""
        self._held_line_break = False
        self._call: list[str | None] = []
        self._calls = 0

    def control(self, token: int) -> Sequence[Delta]:
        match self._names.get(token):
            case tokens.QUOTE:
                return self._quote()
            case tokens.CHANNEL:
                deltas = self._close("channel inside a channel")
                self._state, self._header = _State.HEADER, ""
                return deltas
            case tokens.END_OF_CHANNEL:
                return self._end_channel()
            case tokens.CALL:
                # A model may stop thinking by calling: that ends the channel as well.
                deltas = self._close(None)
                self._state, self._call = _State.CALL, []
                return deltas
            case tokens.END_OF_CALL if self._state is _State.CALL:
                return self._end_call(closed=True)
            case tokens.END_OF_TURN | tokens.END_OF_SEQUENCE | tokens.RESPONSE:
                return self._close("channel without an end")
            case _:
                return [Malformed("unexpected control token")]

    def text(self, text: str) -> Sequence[Delta]:
        match self._state:
            case _State.CONTENT:
                return _content(text)
            case _State.HEADER:
                self._header += text
                return self._read_header(ended=False)
            case _State.REASONING:
                return self._reason(text)
            case _State.CALL:
                self._call.append(text)
                return []

    def finish(self) -> Sequence[Delta]:
        """An output may be cut off anywhere, so an open channel is no fault; half a call is."""
        if self._state is _State.REASONING and self._held_line_break:
            self._held_line_break = False
            return [ReasoningDelta("\n")]
        if self._state is _State.HEADER and _THOUGHT.startswith(self._header):
            return []
        return self._close(None)

    def _close(self, reason: str | None) -> list[Delta]:
        """End whatever is open; ``reason`` is why that is a fault if it is a channel."""
        state, self._state = self._state, _State.CONTENT
        if state is _State.CALL:
            return self._end_call(closed=False)
        deltas: list[Delta] = []
        if state is _State.HEADER:
            deltas += self._read_header(ended=True)
            state, self._state = self._state, _State.CONTENT
        if state is _State.REASONING:
            self._held_line_break = False
            if reason is not None:
                deltas.append(Malformed(reason))
        return deltas

    def _end_channel(self) -> list[Delta]:
        match self._state:
            case _State.HEADER | _State.REASONING:
                return self._close(None)
            case _State.CALL:
                return [*self._end_call(closed=False), Malformed("unexpected control token")]
            case _:
                return [Malformed("unexpected control token")]

    def _read_header(self, *, ended: bool) -> list[Delta]:
        """Leave the header if it is clear what it is; ``ended`` if no more of it can come."""
        name, line_break, rest = self._header.partition("\n")
        too_long = len(name) > _HEADER_CHARACTERS_LIMIT
        if not (line_break or ended or too_long):
            return []
        if name.strip() == _THOUGHT and not too_long:
            self._state = _State.REASONING
            return self._reason(rest)
        if name.startswith(_THOUGHT):
            self._state = _State.REASONING
            thought = self._header.removeprefix(_THOUGHT)
            return [Malformed("channel without a line break"), *self._reason(thought)]
        self._state = _State.CONTENT
        return [Malformed("unknown channel"), *_content(self._header)] if self._header else []

    def _reason(self, text: str) -> list[Delta]:
        """The last line break is held back: the format has one before the channel's end."""
        if not text:
            return []
        if self._held_line_break:
            text = "\n" + text
        self._held_line_break = text.endswith("\n")
        text = text.removesuffix("\n")
        return [ReasoningDelta(text)] if text else []

    def _quote(self) -> list[Delta]:
        if self._state is _State.CALL:
            self._call.append(None)
            return []
        return [Malformed("quote outside a tool call"), *self.text('"')]

    def _end_call(self, *, closed: bool) -> list[Delta]:
        """``closed``: by its own token. Without it, only a call that is whole is one."""
        pieces, self._call = self._call, []
        self._state = _State.CONTENT
        parsed = parse_calls(pieces)
        deltas: list[Delta] = []
        for name, arguments in parsed.calls:
            if name in self._tools:
                deltas.append(ToolCallDelta(self._calls, name=name, arguments=arguments))
                self._calls += 1
            else:
                shown = f"call:{name}{arguments}"
                deltas += [Malformed("call of a tool that was not offered"), *_content(shown)]
        if parsed.rest.strip():
            reason = "tool call that cannot be read" if closed else "tool call without an end"
            deltas += [Malformed(reason), *_content(parsed.rest)]
        elif not parsed.calls and closed:
            deltas.append(Malformed("empty tool call"))
        return deltas


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []
