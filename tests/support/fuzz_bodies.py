"""Random requests: the n-th is always the same one, and one that breaks something can be made smaller.

Bodies begin as sound ones. Properties are added or replaced by what the body's own schema allows, as
pydantic tells it; then things are taken out, doubled and replaced at random, and now and then the JSON
text itself is damaged.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fuzz_values import NAMED, TEXTS, VALUES
from pydantic import BaseModel

ID = "<id>"
WORDS = ("f", "get_weather", "low", "high", "a.b-c", "x")


@dataclass(frozen=True)
class Asked:
    """A request. ``body`` is JSON unless it is bytes, which are sent as they are.

    ``leaves``: the client goes away after the first bytes of the answer. ``then`` are sent if this
    one was answered well, with the answer's id in the place of ``ID``.
    """

    method: str
    path: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    leaves: bool = False
    then: tuple[Asked, ...] = ()

    @property
    def content(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return b"" if self.body is None else json.dumps(self.body).encode()

    def about(self, name: str) -> Asked:
        """This request about the thing of that id."""
        body = json.loads(json.dumps(self.body).replace(ID, name))
        return replace(self, path=self.path.replace(ID, name), body=body)


class Drawing:
    """Draws values of a pydantic model's JSON schema."""

    def __init__(self, model: type[BaseModel], sound: dict[str, Any]) -> None:
        self.sound = sound
        self._schema = model.model_json_schema()

    def body(self, chance: random.Random) -> dict[str, Any]:
        """A body that the schema allows, mostly one that means something."""
        if chance.random() < 0.1:
            return self._object(self._schema, chance, 0)
        body = copy.deepcopy(self.sound)
        names = [name for name in self._schema["properties"] if self._likely(name, chance)]
        for name in chance.sample(names, min(len(names), chance.choice((0, 1, 1, 2, 3, 5)))):
            body[name] = self._named(name, self._schema["properties"][name], chance, 0)
        return body

    def _likely(self, name: str, chance: random.Random) -> bool:
        """A property that may hold anything is mostly there to be refused."""
        described = self._schema["properties"][name]
        return bool({"type", "anyOf", "$ref", "enum"} & described.keys()) or chance.random() < 0.05

    def _named(self, name: str, schema: dict[str, Any], chance: random.Random, depth: int) -> Any:
        known, schema = NAMED.get(name), self._followed(schema)
        if known is not None and not {"enum", "const"} & schema.keys() and chance.random() < 0.9:
            return copy.deepcopy(chance.choice(known))
        return self._value(schema, chance, depth)

    def _followed(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schema["$defs"][schema["$ref"].rpartition("/")[2]]
        return schema

    def _value(self, schema: dict[str, Any], chance: random.Random, depth: int) -> Any:
        schema = self._followed(schema)
        if "anyOf" in schema:
            return self._value(chance.choice(schema["anyOf"]), chance, depth)
        if "enum" in schema:
            return chance.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "object":
                return self._object(schema, chance, depth + 1)
            case "array":
                return self._array(schema, chance, depth + 1)
            case "string":
                return _text(schema, chance)
            case "integer":
                return _whole(schema, chance)
            case "number":
                return _number(schema, chance)
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
        return copy.deepcopy(chance.choice(VALUES))

    def _object(self, schema: dict[str, Any], chance: random.Random, depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        if properties is None:
            return {chance.choice(WORDS): chance.choice(TEXTS) for _ in range(chance.choice((0, 1, 3)))}
        required = schema.get("required", ())
        share = 0.5 if depth < 3 else 0.2
        return {
            name: self._named(name, each, chance, depth)
            for name, each in properties.items()
            if name in required or chance.random() < share
        }

    def _array(self, schema: dict[str, Any], chance: random.Random, depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", 4), 4 if depth < 3 else 1)
        return [
            self._value(schema["items"], chance, depth)
            for _ in range(chance.randint(least, max(least, most)))
        ]


def _text(schema: dict[str, Any], chance: random.Random) -> str:
    least, most, pattern = schema.get("minLength", 0), schema.get("maxLength", 10**6), schema.get("pattern")
    fitting = [
        text
        for text in (TEXTS if pattern is None else WORDS)
        if least <= len(text) <= most and (pattern is None or re.search(pattern, text))
    ]
    return chance.choice(fitting)


def _whole(schema: dict[str, Any], chance: random.Random) -> int:
    least = schema.get("minimum", -3)
    most = schema.get("maximum", schema.get("exclusiveMaximum", 2**40) - 1)
    return chance.choice(
        (least, most, min(most, max(least, 1)), chance.randint(least, min(most, least + 20)))
    )


def _number(schema: dict[str, Any], chance: random.Random) -> float:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -2))
    most = schema.get("maximum", schema.get("exclusiveMaximum", 2))
    least = least if "minimum" in schema else least + 1e-6
    return chance.choice((least, most, chance.uniform(least, most)))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the parts of ``value`` are, itself left out."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in inside:
        yield (*path, step)
        yield from places(each, (*path, step))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def mutated(body: Any, chance: random.Random) -> Any:
    """``body`` with up to three things taken out, doubled or replaced."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 2, 3))):
        found = list(places(body))
        if not found:
            break
        *before, last = chance.choice(found)
        holder = at(body, tuple(before))
        kind = chance.random()
        if kind < 0.25:
            del holder[last]
        elif kind < 0.35 and isinstance(holder, list):
            holder += [copy.deepcopy(holder[last])] * chance.choice((1, 3, 300))
        elif kind < 0.45 and isinstance(holder, dict):
            holder[chance.choice(sorted(NAMED))] = holder.pop(last)
        else:
            holder[last] = copy.deepcopy(chance.choice(VALUES))
    return body


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Text that is mostly no JSON any more, or JSON as nobody writes it."""
    place = chance.randrange(len(data) + 1)
    return chance.choice(
        (
            data[:place],
            data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :],
            data[:place] + chance.choice((b"\xff", b"\x00", b'"', b"{", b"}", b"\\ud800", b"NaN", b"1e999")) + data[place:],
            b"[" * 5000 + data,
            data + data,
            data[:-1] + b',"messages":"x","model":"toy/plain"}',
            b'{"a":' * 3000 + b"1" + b"}" * 3000,
            b"\xef\xbb\xbf" + data,
            data.decode().encode("utf-16"),
            data + b" " * 210_000,
            b"",
        )
    )  # fmt: skip


def smaller(value: Any) -> Iterator[Any]:
    """Simpler things than ``value``, the simplest first."""
    if isinstance(value, bytes):
        for size in (len(value) // 2, len(value) // 4, 16, 1):
            for start in range(0, len(value), size or 1):
                if size:
                    yield value[:start] + value[start + size :]
        return
    for path in sorted(places(value), key=len):
        *before, last = path
        less = copy.deepcopy(value)
        del at(less, tuple(before))[last]
        yield less
    for path in places(value):
        *before, last = path
        part = at(value, path)
        simpler: list[Any] = [None, 0, "x", [], {}] if isinstance(part, dict | list) else [None, 0, "x"]
        if isinstance(part, str):
            simpler.append(part[: len(part) // 2])
        for each in simpler:
            if each != part and len(json.dumps(each)) < len(json.dumps(part)):
                less = copy.deepcopy(value)
                at(less, tuple(before))[last] = each
                yield less


def shrunk(value: Any, still_fails: Callable[[Any], bool], most_tries: int = 400) -> Any:
    """The smallest value that was found to fail; ``value`` itself fails."""
    tries, progress = 0, True
    while progress:
        progress = False
        for less in smaller(value):
            tries += 1
            if tries > most_tries:
                return value
            if still_fails(less):
                value, progress = less, True
                break
    return value
