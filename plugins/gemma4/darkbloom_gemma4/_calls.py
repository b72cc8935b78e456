"""The syntax of tool calls: ``call:NAME{key:<|"|>text<|"|>,n:1,list:[...],nested:{...}}`` to names and JSON.

Pure. Text between two quote tokens is taken as it is: nothing is escaped in it, and braces
in it mean nothing. Beyond the publisher's syntax, JSON strings and plain words are
understood as values. Numbers keep the digits that were written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

DEEPEST = 64

_NAME = re.compile(r"\s*call:([^\s{}()\[\]\"]+)\s*\{")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_JSON = json.JSONDecoder(strict=False)


class _SyntaxError(ValueError):
    """The text is not in the syntax."""


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """``calls`` are (name, arguments as a JSON object); ``rest`` is text after them that is no call, '' if all is well."""

    calls: tuple[tuple[str, str], ...]
    rest: str


def parse_calls(pieces: Sequence[str | None]) -> ParsedCalls:
    """Parse what stood between the tokens around a tool call; ``None`` stands for the quote token.

    ``rest`` shows quote tokens as ``"``.
    """
    text = "".join(piece for piece in pieces if piece is not None)
    quote = _unused_character(text)
    text = "".join(quote if piece is None else piece for piece in pieces)
    calls: list[tuple[str, str]] = []
    place = 0
    while text[place:].strip():
        try:
            name, arguments, place = _Reader(text, quote).call(place)
        except _SyntaxError:
            return ParsedCalls(tuple(calls), text[place:].replace(quote, '"'))
        calls.append((name, arguments))
    return ParsedCalls(tuple(calls), "")


class _Reader:
    """Recursive descent. Each method takes a place in the text and returns JSON and the place after it."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        # A word ends where structure begins; the quote token cannot be inside one.
        self._word = re.compile(rf"[^,:{{}}\[\]{quote}]*")
        self._item = re.compile(rf"[^,{{}}\[\]{quote}]*")

    def call(self, place: int) -> tuple[str, str, int]:
        match = _NAME.match(self._text, place)
        if match is None or self._quote in match[1]:
            raise _SyntaxError
        arguments, place = self._object(match.end(), 1)
        return match[1], arguments, place

    def _object(self, place: int, depth: int) -> tuple[str, int]:
        """After the opening brace."""
        members = []
        place = self._skip(place)
        while not self._is(place, "}"):
            key, place = self._key(place)
            value, place = self._value(self._expect(place, ":"), depth)
            members.append(f"{key}: {value}")
            place = self._separator(place, "}")
        return "{" + ", ".join(members) + "}", place + 1

    def _array(self, place: int, depth: int) -> tuple[str, int]:
        """After the opening bracket."""
        items = []
        place = self._skip(place)
        while not self._is(place, "]"):
            item, place = self._value(place, depth)
            items.append(item)
            place = self._separator(place, "]")
        return "[" + ", ".join(items) + "]", place + 1

    def _key(self, place: int) -> tuple[str, int]:
        if self._is(place, self._quote) or self._is(place, '"'):
            return self._string(place)
        match = self._word.match(self._text, place)
        word = match[0].strip() if match is not None else ""
        if match is None or not word:
            raise _SyntaxError
        return _dump(word), match.end()

    def _value(self, place: int, depth: int) -> tuple[str, int]:
        place = self._skip(place)
        if self._is(place, self._quote) or self._is(place, '"'):
            return self._string(place)
        if self._is(place, "{") or self._is(place, "["):
            if depth == DEEPEST:
                raise _SyntaxError
            nested = self._object if self._is(place, "{") else self._array
            return nested(place + 1, depth + 1)
        match = self._item.match(self._text, place)
        word = match[0].strip() if match is not None else ""
        if match is None or not word:
            raise _SyntaxError
        if _NUMBER.fullmatch(word):
            return word, match.end()
        return _WORDS.get(word) or _dump(word), match.end()

    def _string(self, place: int) -> tuple[str, int]:
        """Between quote tokens, or as JSON writes it."""
        if self._is(place, self._quote):
            end = self._text.find(self._quote, place + 1)
            if end < 0:
                raise _SyntaxError
            return _dump(self._text[place + 1 : end]), end + 1
        try:
            value, end = _JSON.raw_decode(self._text, place)
        except ValueError:
            raise _SyntaxError from None
        return _dump(value.replace(self._quote, '"')), end

    def _separator(self, place: int, closing: str) -> int:
        """After a member: at the closing character, or past a comma."""
        place = self._skip(place)
        return place if self._is(place, closing) else self._skip(self._expect(place, ","))

    def _expect(self, place: int, character: str) -> int:
        place = self._skip(place)
        if not self._is(place, character):
            raise _SyntaxError
        return place + 1

    def _skip(self, place: int) -> int:
        while place < len(self._text) and self._text[place].isspace():
            place += 1
        return place

    def _is(self, place: int, character: str) -> bool:
        return self._text.startswith(character, place)


def _dump(text: str) -> str:
    """A JSON string that is valid UTF-8 whatever escapes the model wrote."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(whole, ensure_ascii=False)


def _unused_character(text: str) -> str:
    used = set(text)
    return next(chr(code) for code in range(0xE000, 0x10FFFE) if chr(code) not in used)
