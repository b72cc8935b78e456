"""What the arguments of a tool call may be, from a JSON schema to the format's own syntax. Pure.

``{key:<|"|>text<|"|>,n:1,list:[...]}``: keys are bare, text stands between quote tokens.
What has no short way to be said so is left to be written as JSON, which ``_calls`` reads as
well: so every schema that can be enforced at all is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from darkbloom_core.contracts import (
    AnyText,
    ControlToken,
    Exactly,
    Grammar,
    InOrder,
    JsonText,
    OneOf,
    RegexText,
    Repeated,
)

OPTIONAL_LIMIT = 8
"""Each optional member before the first required one doubles what may come first."""

DEPTH_LIMIT = 16
"""What is nested deeper is left to JSON."""

SHARED_CHARACTERS_LIMIT = 2048
"""Definitions go with every part that is left to JSON; arguments with more of them are JSON as a whole."""

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$defs", "definitions", "$schema", "$id"}
)
_KEYWORDS = {
    "object": {"type", "properties", "required", "additionalProperties"},
    "array": {"type", "items", "minItems", "maxItems"},
    "string": {"type", "minLength", "maxLength"},
}
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*")
_SHARED = ("$defs", "definitions")


def arguments_grammar(arguments: JsonText, quote: ControlToken | None) -> Grammar:
    """What follows the tool's name. ``quote`` is the token that stands around text, None if there is none."""
    schema = arguments.schema
    if quote is None or isinstance(schema, bool) or not all(map(_is_shared, _references(schema))):
        return arguments
    shared = {key: schema[key] for key in _SHARED if key in schema}
    if len(json.dumps(shared)) > SHARED_CHARACTERS_LIMIT:
        return arguments
    return _Arguments(quote, shared, arguments.lenient).value(schema, arguments.origin)


class _Arguments:
    def __init__(self, quote: ControlToken, shared: Mapping[str, Any], lenient: bool) -> None:
        self._quote = quote
        self._shared = shared
        self._lenient = lenient
        self._depth = 0

    def value(self, schema: Any, origin: str) -> Grammar:
        if self._depth == DEPTH_LIMIT:
            return self._as_json(schema, origin)
        self._depth += 1
        own = self._own(schema, origin)
        self._depth -= 1
        return own or self._as_json(schema, origin)

    def _as_json(self, schema: Any, origin: str) -> Grammar:
        whole = {**self._shared, **schema} if isinstance(schema, Mapping) else schema
        return JsonText(whole, origin, self._lenient)

    def _own(self, schema: Any, origin: str) -> Grammar | None:
        """``schema`` in the format's own syntax, None if there is no short way to say it."""
        if not isinstance(schema, Mapping):
            return None
        keywords = schema.keys() - _NOTES
        if keywords <= {"enum", "type"} and "enum" in keywords:
            return self._one_of_values(schema["enum"], schema.get("type"))
        if keywords <= {"const", "type"} and "const" in keywords:
            return self._one_of_values([schema["const"]], schema.get("type"))
        if keywords == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
            several = enumerate(schema["anyOf"])
            return OneOf(tuple(self.value(each, f"{origin}.anyOf[{index}]") for index, each in several))
        kind = schema.get("type")
        if not isinstance(kind, str) or not keywords <= _KEYWORDS.get(kind, set()):
            return None
        if kind == "object":
            return self._object(schema, origin)
        return self._array(schema, origin) if kind == "array" else self._string(schema, origin)

    def _one_of_values(self, values: Any, kind: Any) -> Grammar | None:
        if not isinstance(values, list) or not values:
            return None
        texts = kind in (None, "string") and all(isinstance(value, str) for value in values)
        if not texts and not (kind is None and all(_is_scalar(value) for value in values)):
            return None
        return OneOf(
            tuple(
                self._quoted(Exactly(value) if value else None)
                if isinstance(value, str)
                else Exactly(json.dumps(value))
                for value in values
            )
        )

    def _string(self, schema: Mapping[str, Any], origin: str) -> Grammar | None:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if (least, most) == (0, None):
            return self._quoted(AnyText())
        if not _is_range(least, most):
            return None
        return self._quoted(RegexText(rf"(.|\n){{{least},{'' if most is None else most}}}", origin))

    def _array(self, schema: Mapping[str, Any], origin: str) -> Grammar | None:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not _is_range(least, most) or most == 0 or "items" not in schema:
            return None
        item = self.value(schema["items"], f"{origin}.items")
        more = Repeated(InOrder((Exactly(","), item)), max(least - 1, 0), None if most is None else most - 1)
        items = Repeated(InOrder((item, more)), min(least, 1), 1)
        return InOrder((Exactly("["), items, Exactly("]")))

    def _object(self, schema: Mapping[str, Any], origin: str) -> Grammar | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not properties or not isinstance(required, list):
            return None
        needed = set(map(str, required))
        if not needed <= properties.keys():
            return None
        members = [
            (self._member(name, each, f"{origin}.properties.{name}"), name in needed)
            for name, each in properties.items()
        ]
        first = [needed for _, needed in members].index(True) if required else len(members)
        if first > OPTIONAL_LIMIT:
            return None
        options = [
            InOrder((member, *_following(members[index + 1 :])))
            for index, (member, _) in enumerate(members[: first + 1])
        ]
        body = Repeated(OneOf(tuple(options)), 1 if required else 0, 1)
        return InOrder((Exactly("{"), body, Exactly("}")))

    def _member(self, name: str, schema: Any, origin: str) -> Grammar:
        value = self.value(schema, origin)
        if _BARE_KEY.fullmatch(name):
            return InOrder((Exactly(f"{name}:"), value))
        return InOrder((self._quoted(Exactly(name) if name else None), Exactly(":"), value))

    def _quoted(self, text: Grammar | None) -> Grammar:
        return InOrder((self._quote, *([] if text is None else [text]), self._quote))


def _following(members: Sequence[tuple[Grammar, bool]]) -> Iterator[Grammar]:
    for member, needed in members:
        yield Repeated(InOrder((Exactly(","), member)), 1 if needed else 0, 1)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _is_range(least: Any, most: Any) -> bool:
    bounds = [bound for bound in (least, most) if bound is not None]
    whole = all(isinstance(bound, int) and not isinstance(bound, bool) and bound >= 0 for bound in bounds)
    return whole and bounds == sorted(bounds)


def _references(schema: Any) -> Iterator[Any]:
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "$ref":
                yield value
            yield from _references(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _is_shared(reference: Any) -> bool:
    return isinstance(reference, str) and reference.startswith(tuple(f"#/{key}/" for key in _SHARED))
