"""From what the model writes to typed deltas, as it arrives.

The format, with ``<...>`` for control tokens::

    <think>\n reasoning \n</think>\n\n answer \n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>

Always true, whatever the model writes: nothing raises; however the text is cut into pieces
the deltas add up to the same; and no text is dropped but line ends next to a control token,
which belong to the format. What breaks the format is shown as text and reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from darkbloom_core.contracts import ContentDelta, Delta, Malformed, ReasoningDelta, ToolCallDelta

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

# The usual beginning of a call, up to the brace that opens the arguments.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


class Qwen3Parser:
    """Matches ``darkbloom_core.contracts.OutputParser`` by having its members.

    An output is a row of sections: reasoning, content, calls. Exactly one is open, and
    every control token closes it and opens the next.
    """

    def __init__(self, tags: Mapping[int | None, str], *, begins_in_thought: bool) -> None:
        """``tags`` names the control tokens that mean something here."""
        self._tags = tags
        self._section: _Prose | _Call = _Prose(ReasoningDelta if begins_in_thought else ContentDelta)
        self._calls = 0

    def control(self, token: int) -> Sequence[Delta]:
        """Close the open section; open the one that the token begins."""
        tag = self._tags.get(token, "")
        deltas = self._close(tag)
        if tag == THINK:
            self._section = _Prose(ReasoningDelta)
        elif tag == CALL:
            self._section = _Call(self._calls)
        else:
            self._section = _Prose(ContentDelta)
        return deltas

    def text(self, text: str) -> Sequence[Delta]:
        """Ordinary text belongs to the open section."""
        return self._section.text(text)

    def finish(self) -> Sequence[Delta]:
        """Hand out what the open section held back."""
        return self._section.finish()

    def _close(self, tag: str) -> list[Delta]:
        section = self._section
        if isinstance(section, _Call):
            deltas = section.close(complete=tag == CALL_END)
            self._calls += section.was_called
            return deltas
        begins_here = {THINK: ContentDelta, CALL: ContentDelta, THINK_END: ReasoningDelta}
        return [] if section.kind is begins_here.get(tag) else [Malformed("misplaced control token")]


class _Prose:
    """Reasoning or content. Line ends at its edges belong to the format."""

    def __init__(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> None:
        self.kind = kind
        self._begun = False
        self._held = ""

    def text(self, text: str) -> list[Delta]:
        """All of it but the line ends at the end, which may turn out to be the edge."""
        waiting = self._held + text if self._begun else text.lstrip("\n")
        shown = waiting.rstrip("\n")
        self._held = waiting[len(shown) :]
        if not shown:
            return []
        self._begun = True
        return [self.kind(shown)]

    def finish(self) -> list[Delta]:
        """No control token came after the line ends, so they are text."""
        held, self._held = self._held, ""
        return [self.kind(held)] if held else []


class _Call:
    """One tool call. Its name is given out when it is complete, its arguments as they come."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""  # all of it, until the head is recognised; then what comes after the arguments
        self._arguments: _JsonObject | None = None
        self.was_called = False

    def text(self, text: str) -> list[Delta]:
        if self._arguments is None:
            self._text += text
            head = _HEAD.match(self._text)
            name = _name(head[1]) if head is not None else None
            if head is None or name is None:
                return []
            text, self._text = self._text[head.end() :], ""
            self._arguments = _JsonObject()
            self.was_called = True
            return [ToolCallDelta(self._index, name), *self._argument_text(text)]
        return self._argument_text(text)

    def close(self, *, complete: bool) -> list[Delta]:
        """The call has ended, by its control token if it is ``complete``."""
        if self._arguments is not None:
            if not complete or self._text.strip() != "}" or not self._arguments.is_valid():
                return [Malformed("broken tool call"), *self._left_over()]
            return []
        call = _whole_call(self._text) if complete else None
        if call is None:
            end = CALL_END if complete else ""
            return [Malformed("broken tool call"), ContentDelta(f"{CALL}{self._text}{end}")]
        self.was_called = True
        return [ToolCallDelta(self._index, *call)]

    def finish(self) -> list[Delta]:
        return self.close(complete=False)

    def _argument_text(self, text: str) -> list[Delta]:
        assert self._arguments is not None
        inside = self._arguments.take(text)
        self._text += text[len(inside) :]
        return [ToolCallDelta(self._index, None, inside)] if inside else []

    def _left_over(self) -> list[Delta]:
        """What stood after the arguments where nothing but a brace should stand."""
        text = self._text.strip().removeprefix("}").strip()
        return [ContentDelta(text)] if text else []


class _JsonObject:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._ended = False

    def take(self, text: str) -> str:
        """The part of ``text`` that still belongs to the object."""
        end = len(text) if not self._ended else 0
        for position, character in enumerate(text[:end]):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    self._ended, end = True, position + 1
                    break
        self._text += text[:end]
        return text[:end]

    def is_valid(self) -> bool:
        return isinstance(_parsed(self._text), dict)


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is valid JSON but not written in the usual order."""
    call = _parsed(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _name(quoted: str) -> str | None:
    name = _parsed(quoted)
    return name if isinstance(name, str) else None


def _parsed(text: str) -> Any:
    """The JSON value, None if it is none. A model may nest so deeply that Python gives up."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
