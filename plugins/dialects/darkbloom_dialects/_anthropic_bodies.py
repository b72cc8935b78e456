"""The bodies of Anthropic's Messages API: https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from darkbloom_dialects._bodies import MAX_STOP_STRINGS, Body, Items, Name, StopString, ToolName


class ImageSource(Body):
    """``data`` is base64 of type ``media_type``; a ``url`` must be a data: URI, since nothing is fetched."""

    type: Name
    media_type: Name | None = None
    data: str | None = None
    url: str | None = None


class Block(Body):
    """A content block of any type; which types a turn may have is decided where it is converted."""

    type: Name
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    source: ImageSource | None = None
    content: Any = None
    is_error: bool | None = None


class ResultBody(Body):
    """What a ``tool_result`` block holds."""

    content: str | Items[Block] | None = None


class Turn(Body):
    role: Literal["user", "assistant"]
    content: str | Items[Block]


class ToolBody(Body):
    """A tool of the client; tools that a server would run have another ``type``."""

    type: Name | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceBody(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """``POST /v1/messages/count_tokens``."""

    model: Name
    messages: Annotated[Items[Turn], Field(min_length=1)]
    system: str | Items[Block] | None = None
    tools: Items[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    container: Any = None
    mcp_servers: Any = None


class MessagesBody(CountBody):
    """``POST /v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[Items[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    stream: bool | None = None
