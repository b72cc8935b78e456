"""What the bodies of both dialects are made of: pydantic models of shapes and ranges, nothing about meaning.

Fields that are not listed are ignored, and null is the same as absent. A field that would
change the answer but is not supported is listed all the same, so that it can be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from darkbloom_core.contracts import Tool
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.server import AskedMedia, asked_media

MAX_STOP_STRINGS = 16

MEDIA = {"document": "documents", "input_file": "files"}
MEDIA |= {"input_audio": "audio", "input_video": "videos", "file": "files"}

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first bad item is enough: a body of a million bad ones must not become a million errors."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


def refuse(body: Body, *names: str) -> None:
    """Refuse the fields ``names``; empty ones ask for nothing."""
    for name in names:
        if getattr(body, name):
            raise InvalidRequest(f"{name}: not supported", param=name)


def required(value: Any, where: str) -> Any:
    """``value``, which must be there."""
    if value is None:
        raise InvalidRequest(f"{where}: field required", param=where)
    return value


def may_show(role: str, where: str) -> None:
    """Refuse a picture at ``where`` in a message of ``role``; only users and tools may show any."""
    if role not in ("user", "tool"):
        raise InvalidRequest(f"{where}: a message of the role {role} cannot hold images", param=where)


def image_part(uri: str, where: str) -> AskedMedia:
    """A picture whose data: URI came in the field ``where``."""
    return asked_media("image", uri, where)


def unknown_part(kind: str, where: str) -> InvalidRequest:
    """The refusal of a part of a message that is no text."""
    if kind in MEDIA:
        return InvalidRequest(f"{where}: this model does not accept {MEDIA[kind]}", param=where)
    return InvalidRequest(f"{where}.type: unknown type of content", param=f"{where}.type")


def distinct_tools(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """All of them; two of the same name are refused."""
    return tuple(_distinct(tools))


def _distinct(tools: Iterable[Tool]) -> Iterator[Tool]:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            where = f"tools[{index}].name"
            raise InvalidRequest(f"{where}: two tools have the same name", param=where)
        seen.add(tool.name)
        yield tool
