"""What an output may be: a family spells out the shape of a whole output, a client what its answer must be.

A grammar covers an output from its first token to the control token that ends it, so there
is one way to say where the answer stands and what it must look like there. Plain values;
the core compiles them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Exactly:
    """This text, which is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ControlToken:
    """This control token."""

    token: int


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any text, or none; no control tokens. What follows must begin with a control token."""


@dataclass(frozen=True, slots=True)
class JsonText:
    """JSON that fits ``schema``, without space around it.

    ``lenient``: keywords that cannot be enforced are ignored, else they are refused.
    ``origin`` is the field of the request that a fault in it belongs to.
    """

    schema: Mapping[str, Any] | bool
    origin: str
    lenient: bool = False


@dataclass(frozen=True, slots=True)
class RegexText:
    """Text that ``pattern`` matches from its beginning to its end."""

    pattern: str
    origin: str


@dataclass(frozen=True, slots=True)
class LarkText:
    """Text that the rule ``start`` of a grammar in Lark's syntax derives."""

    source: str
    origin: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """Any one of these, of which there is at least one."""

    options: tuple[Grammar, ...]


@dataclass(frozen=True, slots=True)
class InOrder:
    """All of these, one after another."""

    parts: tuple[Grammar, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """``part``, at least ``least`` times and, unless it is None, at most ``most`` times."""

    part: Grammar
    least: int = 0
    most: int | None = None


ClientText: TypeAlias = JsonText | RegexText | LarkText
"""What clients may ask an answer to be."""

Grammar: TypeAlias = Exactly | ControlToken | AnyText | ClientText | OneOf | InOrder | Repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What the client wants the answer's text to be. ``name`` and ``description`` may be told to the model."""

    text: ClientText
    name: str = ""
    description: str = ""


class TokenConstraint(Protocol):
    """Which tokens may come next in one output. Made anew for every output; one thread at a time calls it."""

    @property
    def complete(self) -> bool:
        """Whether the output is whole: no token may follow."""
        ...

    def allowed(self) -> bytes | None:
        """A bit for each token id, from the lowest of the first byte on; None if any token may follow.

        Ids beyond its end are not allowed. Raises ``DarkbloomError`` if nothing may follow.
        """
        ...

    def accept(self, token: int) -> None:
        """``token`` follows. Raises ``DarkbloomError`` if it may not."""
        ...
