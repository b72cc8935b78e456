"""Whether compiling what a client sent could take too much time, memory or stack. Pure.

llguidance counts its own work, but what one unit of it costs has no bound where several
expressions must hold at once, so that is refused: patterns, formats and multiples that meet
at one place of a schema, and a grammar's own intersections and complements. All else grows
with what was sent, which is bounded here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, TypeAlias

from darkbloom_core.contracts import ClientText, JsonText, LarkText, RegexText
from darkbloom_core.errors import InvalidRequest

SCHEMA_CHARACTERS_LIMIT = 256 * 1024
GRAMMAR_CHARACTERS_LIMIT = 64 * 1024
MEMBERS_LIMIT = 1000
"""Of one object, or options of one choice: the compiler's time grows with their square."""

ALL_MEMBERS_LIMIT = 5000
"""Of all objects and choices of all schemas together."""

ALL_CHARACTERS_LIMIT = 2 * SCHEMA_CHARACTERS_LIMIT
"""Of all schemas of a request together."""

WORK_LIMIT = 60_000
"""Of looking which schemas meet: about half a second."""

MULTIPLES_LIMIT = 20_000
"""Of all ``multipleOf`` together, in units of their last digits: each is a machine of that many states."""

NAMES_CHARACTERS_LIMIT = 64
"""Of each of several patterns of names: the compiler compares them with each other."""

Schema: TypeAlias = Mapping[str, Any]

_LARK_WORD = re.compile(
    r"""//[^\n]* | \#[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/ | %\s*(\w+) | (&) | (~)(?!\s*\d)""",
    re.VERBOSE,
)
_PLAIN_REFERENCE = re.compile(r"#(/[^%]*)?")
_INLINE = ("json", "regex", "llguidance")


def check_bounds(texts: Iterable[ClientText]) -> None:
    """Raise ``InvalidRequest`` if compiling ``texts`` could take too much."""
    work = _Work()
    for text in texts:
        if isinstance(text, JsonText):
            _check_schema(text, work)
        else:
            _check_source(text)


def _check_source(text: LarkText | RegexText) -> None:
    source = text.source if isinstance(text, LarkText) else text.pattern
    if len(source) > GRAMMAR_CHARACTERS_LIMIT:
        raise _refused(text, f"longer than {GRAMMAR_CHARACTERS_LIMIT} characters")
    for found in _LARK_WORD.finditer(source) if isinstance(text, LarkText) else ():
        if found[1] in _INLINE:
            raise _refused(text, f"%{found[1]} is not supported")
        if found[2] or found[3]:
            raise _refused(text, "intersections (&) and complements (~) are not supported")


class _Work:
    """What all schemas of a request may take together."""

    def __init__(self) -> None:
        self.characters = ALL_CHARACTERS_LIMIT
        self.members = ALL_MEMBERS_LIMIT
        self._steps = WORK_LIMIT
        self.text: ClientText | None = None

    def spend(self, length: int) -> None:
        """For a step over sequences of ``length``."""
        self._steps -= 1 + length // 64
        if self._steps < 0 and self.text is not None:
            raise _refused(self.text, "the schema is too complex")


def _check_schema(text: JsonText, work: _Work) -> None:
    work.text = text
    length = len(json.dumps(text.schema))
    if length > SCHEMA_CHARACTERS_LIMIT:
        raise _refused(text, f"the schema has more than {SCHEMA_CHARACTERS_LIMIT} characters")
    work.characters -= length
    if work.characters < 0:
        raise _refused(text, f"the schemas have more than {ALL_CHARACTERS_LIMIT} characters in all")
    _check_members(text, work)
    if not isinstance(text.schema, Mapping):
        return
    total = 0
    for together in places(text.schema, work):
        found = [schema[key] for schema in together for key in ("pattern", "format") if key in schema]
        if len(set(map(str, found))) > 1:
            raise _refused(text, "patterns and formats that must hold at once are not supported")
        multiples = {_multiple(schema.get("multipleOf")) for schema in together} - {0}
        if len(multiples) > 1:
            raise _refused(text, "several multipleOf that must hold at once are not supported")
        total += sum(multiples)
        if total > MULTIPLES_LIMIT:
            raise _refused(text, "multipleOf is too large")
        _check_names(text, together)


def _check_names(text: JsonText, together: Iterable[Schema]) -> None:
    names = {name for schema in together for name in _mapping(schema, "patternProperties")}
    if len(names) > 1 and any(len(name) > NAMES_CHARACTERS_LIMIT or "{" in name for name in names):
        reason = f"several patternProperties may each have {NAMES_CHARACTERS_LIMIT} characters and no counts"
        raise _refused(text, reason)


def _check_members(text: JsonText, work: _Work) -> None:
    waiting: list[Any] = [text.schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(value)
        if not isinstance(value, Mapping):
            continue
        waiting.extend(value.values())
        _check_names_of_schemas(text, value)
        for key in ("properties", "required", "allOf", "anyOf", "oneOf"):
            members = value.get(key)
            count = len(members) if isinstance(members, Mapping | list) else 0
            work.members -= 0 if key == "required" else count
            if count > MEMBERS_LIMIT:
                raise _refused(text, f"{key} has more than {MEMBERS_LIMIT} members")
    if work.members < 0:
        raise _refused(text, f"the schemas have more than {ALL_MEMBERS_LIMIT} members in all")


def _check_names_of_schemas(text: JsonText, schema: Schema) -> None:
    """What a reference stands for is looked up here as in the compiler only if it is a plain path from the root."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and not _PLAIN_REFERENCE.fullmatch(reference):
        raise _refused(text, "only a $ref of the form #/$defs/name is supported")
    if isinstance(schema.get("$id"), str) and schema is not text.schema:
        raise _refused(text, "only the whole schema may have an $id")


def places(root: Schema, work: _Work) -> Iterator[tuple[Schema, ...]]:
    """The schemas that must hold together, for every place of a value and each choice among options there."""
    seen: set[frozenset[int]] = set()
    waiting: list[tuple[Any, ...]] = [(root,)]
    while waiting:
        for together in _choices(root, waiting.pop(), work):
            key = frozenset(map(id, together))
            if key not in seen:
                seen.add(key)
                yield together
                waiting.extend(_below(together, work))


def _choices(root: Schema, schemas: tuple[Any, ...], work: _Work) -> Iterator[tuple[Schema, ...]]:
    """``schemas`` and what they say must hold as well, for each choice among their options."""
    waiting: list[tuple[tuple[Any, ...], tuple[Schema, ...]]] = [(schemas, ())]
    while waiting:
        todo, done = waiting.pop()
        work.spend(len(todo) + len(done))
        if not todo:
            yield done
            continue
        first, rest = _named(root, todo[0], work), todo[1:]
        if not isinstance(first, Mapping) or any(first is each for each in done):
            waiting.append((rest, done))
            continue
        more = [*_list(first, "allOf"), *_targets(root, first)]
        options = [found for key in ("anyOf", "oneOf") if (found := _list(first, key))]
        for choice in product(*options):
            work.spend(len(todo) + len(done))
            waiting.append(((*choice, *more, *rest), (*done, first)))


def _below(together: tuple[Schema, ...], work: _Work) -> Iterator[tuple[Any, ...]]:
    """The sets of schemas that must hold for the members and items of a value."""
    any_name = [each for schema in together for each in _mapping(schema, "patternProperties").values()]
    for name in {name: None for schema in together for name in _mapping(schema, "properties")}:
        work.spend(8 * len(together))
        yield (*(_member(schema, name) for schema in together), *any_name)
    others = [schema.get("additionalProperties") for schema in together]
    yield from ((each, *others) for each in any_name)
    yield tuple(others)
    for place in range(max((len(_list(schema, "prefixItems")) for schema in together), default=0)):
        work.spend(8 * len(together))
        yield tuple(_item(schema, place) for schema in together)
    yield tuple(schema.get("items") for schema in together)


def _member(schema: Schema, name: str) -> Any:
    members = _mapping(schema, "properties")
    return members[name] if name in members else schema.get("additionalProperties")


def _item(schema: Schema, place: int) -> Any:
    items = _list(schema, "prefixItems")
    return items[place] if place < len(items) else schema.get("items")


def _named(root: Schema, schema: Any, work: _Work) -> Any:
    """``schema``, or what it stands for if it is only another's name."""
    seen: set[int] = set()
    while isinstance(schema, Mapping) and schema.keys() == {"$ref"} and (found := _targets(root, schema)):
        if id(schema) in seen:
            return None
        seen.add(id(schema))
        work.spend(0)
        schema = found[0]
    return schema


def _targets(root: Schema, schema: Schema) -> list[Any]:
    """What ``$ref`` stands for, if it is in this schema."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return []
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return []
    return [found]


def _mapping(schema: Schema, key: str) -> Mapping[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _multiple(value: object) -> int:
    """``value`` without its decimal point."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    written = f"{abs(value):f}".rstrip("0") if isinstance(value, float) else str(abs(value))
    return int(re.sub(r"[^0-9]", "", written)[:12] or "0")


def _refused(text: ClientText, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{text.origin}: {reason}", param=text.origin)
