"""The JSON bodies that clients send, as pydantic models: shapes and ranges, nothing about what they mean.

Fields that are not listed are ignored, as OpenAI's API ignores them. A field that would
change the answer but is not supported is listed here all the same, so that it can be
refused instead of silently ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails, from_json

from darkbloom_core.errors import InvalidRequest

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_NAME_CHARACTERS = 256

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first bad item is enough: a body of a million bad ones must not become a million errors."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARACTERS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class FunctionCall(_Body):
    """``arguments`` is JSON text; an object is taken as it is."""

    name: Name
    arguments: str | dict[str, Any] = ""


class HistoricToolCall(_Body):
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


class MediaUrl(_Body):
    """``detail`` is not listed: how large a picture is looked at is the model's own business."""

    url: str


class ContentPart(_Body):
    """A part of any type; which types a role may have is decided where it is converted."""

    type: Name
    text: str | None = None
    image_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    refusal: str | None = None


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None
    reasoning_content: str | None = None
    name: Name | None = None
    tool_calls: Items[HistoricToolCall] | None = None
    tool_call_id: Name | None = None
    function_call: Any = None


class FunctionTool(_Body):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolEntry(_Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(_Body):
    name: Name


class NamedToolChoice(_Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(_Body):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class GrammarFormat(_Body):
    syntax: Literal["lark", "regex"]
    definition: str


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    grammar: GrammarFormat | None = None


class StreamOptions(_Body):
    include_usage: bool | None = None


class GenerationBody(_Body):
    """What chat and text completion have in common. None is the same as absent."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    prompt_cache_key: Name | None = None


class ChatCompletionBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Items[ToolEntry] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,32}$")] | None = None
    modalities: Items[Name] | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | Annotated[Items[str], Field(min_length=1, max_length=1)]
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=5)


Body = TypeVar("Body", bound=BaseModel)

MOST_MARKS = 400_000
"""Of commas, braces and brackets in a body, more than a context's worth of text has. Each may become a value, for
which no other thread runs and a hundred bytes are taken; three bytes of a body are enough for one."""


def read_json(data: bytes, model: type[Body]) -> Body:
    """Read ``data`` as JSON of the shape ``model``. Raises ``InvalidRequest`` that names the first field at fault."""
    marks = sum(data.count(mark) for mark in (b",", b"{", b"["))
    if marks > MOST_MARKS:
        raise InvalidRequest(
            f"the body has {marks} commas, braces and brackets, in texts and beside them, and at most {MOST_MARKS} are read"
        )
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _invalid(error, value) from None


def _invalid(error: ValidationError, value: dict[str, Any]) -> InvalidRequest:
    """The fault that lies deepest: of a union, it belongs to the alternative that fitted best.

    At the same depth a wrong value counts more than a wrong type.
    """
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    located = [(_location(fault, value), fault) for fault in faults]
    location, fault = max(located, key=lambda each: (len(each[0]), not each[1]["type"].endswith("_type")))
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")
    message = "Input should be an object" if fault["type"] == "model_type" else fault["msg"]
    return InvalidRequest(f"{param}: {message[0].lower()}{message[1:]}", param=param)


def _location(fault: ErrorDetails, value: Any) -> list[str | int]:
    """The keys and indices that lead to ``fault``. Pydantic mixes names of alternatives in; they are left out."""
    location: list[str | int] = []
    *_, last = fault["loc"]
    for step in fault["loc"]:
        if isinstance(value, dict) and (step in value or (step is last and fault["type"] == "missing")):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            continue
        location.append(step)
    return location
