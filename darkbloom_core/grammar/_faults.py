"""What is wrong with a grammar or schema that a client sent, and where in it. Pure but for the compiler that is passed in.

llguidance says what it does not take, but not where in a schema: the deepest subschema that
is refused by itself, for the same reason, is the place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from darkbloom_core.contracts import ClientText, JsonText, LarkText
from darkbloom_core.errors import InvalidRequest

SUBSCHEMAS_LIMIT = 500
REASON_CHARACTERS = 200

_IN_MAPPINGS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ALONE = (
    *("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"),
    *("not", "if", "then", "else", "contains"),
)
_SHARED = ("$defs", "definitions")

_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_ADVICE = ("; following special tokens", ". Enable '")
"""Where the compiler begins to speak of what its own caller could do."""

_REASONS = {"NoExtensionBias": "nothing can be written that fits it"}

Place: TypeAlias = tuple[str | int, ...]


def find_fault(
    texts: Sequence[ClientText],
    fault: str,
    fault_of: Callable[[ClientText], str],
    in_time: Callable[[], bool],
) -> InvalidRequest:
    """The error that says which of ``texts`` is to blame for ``fault``, and where in it, as far as is found in time."""
    for text in texts:
        if own := fault_of(text) if in_time() else "":
            reason = _reason(own)
            place = _place_in(text, reason, fault_of, in_time) if isinstance(text, JsonText) else ()
            line = _line(own) if isinstance(text, LarkText) else ""
            return _invalid(text.origin + _path(place), line + reason)
    if not texts:
        return InvalidRequest(f"the answer cannot be constrained: {_reason(fault)}")
    where = re.split(r"[.\[]", texts[0].origin)[0]  # the field of the body that all of them are in
    return _invalid(where, f"cannot be compiled: {_reason(fault)}")


def subschemas(schema: object, place: Place = ()) -> Iterator[tuple[Place, Mapping[str, Any] | bool]]:
    """``schema`` and every schema in it, with the keys and indices that lead there."""
    if isinstance(schema, bool):
        yield place, schema
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key, value in schema.items():
        if key in _ALONE:
            yield from subschemas(value, (*place, key))
        elif key in _IN_MAPPINGS and isinstance(value, Mapping):
            for name, each in value.items():
                yield from subschemas(each, (*place, key, name))
        elif key in _IN_LISTS and isinstance(value, list):
            for index, each in enumerate(value):
                yield from subschemas(each, (*place, key, index))


def _place_in(
    text: JsonText, reason: str, fault_of: Callable[[ClientText], str], in_time: Callable[[], bool]
) -> Place:
    root = text.schema if isinstance(text.schema, Mapping) else {}
    shared = {key: root[key] for key in _SHARED if key in root}
    deepest: Place = ()
    for place, schema in islice(subschemas(text.schema), SUBSCHEMAS_LIMIT):
        if not in_time():
            break
        if len(place) <= len(deepest):
            continue
        alone = schema if isinstance(schema, bool) else {**shared, **schema}
        if _reason(fault_of(JsonText(alone, text.origin, text.lenient))) == reason:
            deepest = place
    return deepest


def _reason(fault: str) -> str:
    """The line that says what is wrong, without the tokens that a grammar could have named."""
    lines = [line.strip() for line in fault.splitlines()] or [""]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    told = _LARK_PLACE.sub("", told)
    for advice in _ADVICE:
        told = told.partition(advice)[0]
    return _REASONS.get(told, told)[:REASON_CHARACTERS]


def _line(fault: str) -> str:
    """Where in a grammar ``fault`` is."""
    found = _LARK_PLACE.match(fault)
    return f"line {found[1]}, column {found[2]}: " if found else ""


def _path(place: Place) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)


def _invalid(where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {reason}", param=where)
