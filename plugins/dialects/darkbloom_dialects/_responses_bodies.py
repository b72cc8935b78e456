"""The body of OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from darkbloom_dialects._bodies import Body, Items, Name, ToolName


class ContentPart(Body):
    """A part of any type; which types a place may have is decided where it is converted."""

    type: Name
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: Name | None = None


class InputItem(Body):
    """An item of any type, as it comes from a client or out of an earlier response."""

    type: Name = "message"
    id: Name | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Items[ContentPart] | None = None
    summary: Items[ContentPart] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | Items[ContentPart] | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedToolChoice(Body):
    type: Literal["function"]
    name: Name


class ReasoningBody(Body):
    effort: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,32}$")] | None = None


class TextFormat(Body):
    """``name``, ``description``, ``schema`` and ``strict`` belong to ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_\-]{1,64}$")] | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextBody(Body):
    format: TextFormat | None = None


class ResponsesBody(Body):
    """``POST /v1/responses``."""

    model: Name
    input: str | Annotated[Items[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = None
    include: Items[Name] | None = None
    metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream: bool | None = None
    prompt_cache_key: Name | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
