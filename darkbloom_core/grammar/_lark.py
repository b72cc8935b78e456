"""A grammar of the contract in llguidance's own words: one Lark grammar and one part for each text of a client. Pure.

The syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from darkbloom_core.contracts import (
    AnyText,
    ClientText,
    ControlToken,
    Exactly,
    Grammar,
    InOrder,
    JsonText,
    LarkText,
    OneOf,
    RegexText,
)

WHITESPACE = r"\x20|\x0A[\x20\x09]{0,64}"
"""Between JSON's own characters: a space, or a new line and its indentation. Some models would write space for ever."""

_ANY_TEXT = r"/(.|\n)*/"


def lark_sources(grammar: Grammar) -> str:
    """What ``LLMatcher`` is made of."""
    sources = _Sources()
    start = sources.expression(grammar)
    rules = [f"start: {start}", *(f"{name}: {body}" for body, name in sources.rules.items())]
    parts = [{"name": "output", "lark_grammar": "\n".join(rules)}, *sources.parts]
    return json.dumps({"grammars": parts}, separators=(",", ":"))


def client_texts(grammar: Grammar) -> Iterator[ClientText]:
    """Every text in ``grammar`` that a client described, once and in order."""
    seen: set[int] = set()
    waiting = [grammar]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        match each:
            case JsonText() | RegexText() | LarkText():
                yield each
            case OneOf(several) | InOrder(several):
                waiting.extend(reversed(several))
            case Exactly() | ControlToken() | AnyText():
                pass
            case _:
                waiting.append(each.part)


def json_part(text: JsonText) -> dict[str, Any]:
    """The part of a schema, with our own options instead of any that stand in it."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": text.lenient, "coerce_one_of": text.lenient}
    if isinstance(text.schema, bool):
        return {"json_schema": text.schema}
    return {"json_schema": {**text.schema, "x-guidance": options}}


class _Sources:
    """Rules by what they say, so that nothing is said twice or nested deeply."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        self.rules: dict[str, str] = {}
        self._known: dict[int, str] = {}

    def expression(self, grammar: Grammar) -> str:
        """A grammar may stand in many places of another: it is gone through once."""
        if id(grammar) not in self._known:
            self._known[id(grammar)] = self._expression(grammar)
        return self._known[id(grammar)]

    def _expression(self, grammar: Grammar) -> str:
        match grammar:
            case Exactly(text):
                return json.dumps(text, ensure_ascii=False)
            case ControlToken(token):
                return f"<[{token}]>"
            case AnyText():
                return _ANY_TEXT
            case JsonText():
                return self._reference(json_part(grammar))
            case RegexText():
                return self._reference({"lark_grammar": f"start: {regex_literal(grammar.pattern)}\n"})
            case LarkText():
                return self._reference({"lark_grammar": grammar.source})
            case OneOf(options):
                return self._rule(" | ".join(map(self.expression, options)))
            case InOrder(parts):
                return self._rule(" ".join(map(self.expression, parts)))
            case _:
                most = "" if grammar.most is None else grammar.most
                return self._rule(f"({self.expression(grammar.part)}){{{grammar.least},{most}}}")

    def _rule(self, body: str) -> str:
        return self.rules.setdefault(body, f"rule{len(self.rules)}")

    def _reference(self, part: dict[str, Any]) -> str:
        name = f"part{len(self.parts)}"
        self.parts.append({"name": name, **part})
        return f"@{name}"


def regex_literal(pattern: str) -> str:
    """``pattern`` between slashes; a slash or a line break of its own is escaped."""
    out, escaped = [], False
    for character in pattern:
        if character == "/" and not escaped:
            out.append(r"\/")
        elif character == "\n":
            out.append("n" if escaped else r"\n")
        else:
            out.append(character)
        escaped = character == "\\" and not escaped
    return f"/{''.join(out)}/"
