"""From Anthropic's bodies to plain values: what each field means, and what is refused.

Every fault is an ``InvalidRequest`` that names the field. ``cache_control``, ``metadata``
and other hints are not read: they change no answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

from pydantic import ValidationError

from darkbloom_core.contracts import (
    AnswerFormat,
    Chat,
    JsonText,
    Message,
    Part,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.server import AnswerRequest, SamplingOverrides
from darkbloom_dialects._anthropic_bodies import (
    Block,
    CountBody,
    ImageSource,
    MessagesBody,
    ResultBody,
    ToolBody,
    Turn,
)
from darkbloom_dialects._bodies import distinct_tools, image_part, may_show, refuse, required, unknown_part

MEDIUM_BUDGET_TOKENS = 4096
HIGH_BUDGET_TOKENS = 16384
"""A budget for thinking becomes a word, the only thing that families know: low below the first number, high from
the second on."""

FORMAT_NAME = "answer"
"""Formats have no name in this dialect; families that tell the model of one need one."""

_EFFORTS = {"xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class AskedMessage:
    """``shows_thinking``: the client wants to see what the model thinks before it answers."""

    request: AnswerRequest
    shows_thinking: bool


def asked_message(body: MessagesBody, today: date) -> AskedMessage:
    """What ``POST /v1/messages`` asks for."""
    request = AnswerRequest(
        model=body.model,
        source=asked_chat(body, today),
        max_tokens=body.max_tokens,
        sampling=SamplingOverrides(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        stop=tuple(dict.fromkeys(body.stop_sequences or ())),
        streamed=body.stream is True,
    )
    return AskedMessage(request, _thinks(body))


def asked_chat(body: CountBody, today: date) -> Chat:
    """The conversation that a body holds."""
    refuse(body, "container", "mcp_servers")
    if body.messages[-1].role == "assistant":
        where = f"messages[{len(body.messages) - 1}]"
        raise InvalidRequest(
            f"{where}: the last message must be the user's; an answer cannot be begun for the model",
            param=where,
        )
    tools = distinct_tools(_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ()))
    tool_choice, named_tool = _tool_choice(body, tools)
    one_by_one = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use is True
    return Chat(
        messages=(
            *_system(body),
            *(each for index, turn in enumerate(body.messages) for each in _turn(turn, f"messages[{index}]")),
        ),
        tools=tools,
        tool_choice=tool_choice,
        named_tool=named_tool,
        parallel_tool_calls=not one_by_one,
        reasoning_effort=_effort(body),
        answer=_answer_format(body),
        today=today,
    )


def _answer_format(body: CountBody) -> AnswerFormat | None:
    """``output_format`` is what the field was called before ``output_config`` had it."""
    if body.output_config is not None and body.output_config.format is not None:
        where, asked = "output_config.format", body.output_config.format
    elif body.output_format is not None:
        where, asked = "output_format", body.output_format
    else:
        return None
    return AnswerFormat(text=JsonText(asked.json_schema, f"{where}.schema"), name=FORMAT_NAME)


def _thinks(body: CountBody) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _effort(body: CountBody) -> str | None:
    """None leaves it to the model, which is all that a model that always thinks can do if thinking is off."""
    if not _thinks(body):
        return None
    if body.output_config is not None and body.output_config.effort is not None:
        return _EFFORTS.get(body.output_config.effort, body.output_config.effort)
    budget = body.thinking.budget_tokens if body.thinking is not None else None
    if budget is None:
        return "medium"
    if budget < MEDIUM_BUDGET_TOKENS:
        return "low"
    return "medium" if budget < HIGH_BUDGET_TOKENS else "high"


def _tool(tool: ToolBody, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"{where}.type: only tools of the client are supported", param=f"{where}.type")
    schema = required(tool.input_schema, f"{where}.input_schema")
    return Tool(
        name=tool.name,
        description=tool.description or "",
        parameters=schema,
        strict=tool.strict is True,
        origin=f"{where}.input_schema",
    )


def _tool_choice(body: CountBody, tools: tuple[Tool, ...]) -> tuple[ToolChoice, str | None]:
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return "auto", None
    if choice.type == "none":
        return "none", None
    if choice.type == "any":
        if not tools:
            raise InvalidRequest("tool_choice: a tool is required, but tools is empty", param="tool_choice")
        return "required", None
    name: str = required(choice.name, "tool_choice.name")
    if name not in {tool.name for tool in tools}:
        raise InvalidRequest("tool_choice.name: no such tool in tools", param="tool_choice.name")
    return "required", name


def _system(body: CountBody) -> Iterator[Message]:
    if body.system is None:
        return
    text = body.system
    if not isinstance(text, str):
        text = "\n\n".join(_text(block, f"system[{index}]") for index, block in enumerate(text))
    if text:
        yield Message(role="system", content=(TextPart(text),))


def _turn(turn: Turn, where: str) -> Iterator[Message]:
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=_parts(turn.content))
    elif turn.role == "assistant":
        yield _assistant(turn.content, where)
    else:
        yield from _user(turn.content, where)


def _user(blocks: list[Block], where: str) -> Iterator[Message]:
    """Results of tools are messages of their own, in their place among the text."""
    parts: list[Part] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block.type != "tool_result":
            parts.append(_part(block, place, "user"))
            continue
        if parts:
            yield Message(role="user", content=tuple(parts))
            parts = []
        call: str = required(block.tool_use_id, f"{place}.tool_use_id")
        yield Message(role="tool", content=_result(block, place), tool_call_id=call)
    if parts or not blocks:
        yield Message(role="user", content=tuple(parts))


def _result(block: Block, where: str) -> tuple[Part, ...]:
    """A result's text, then its images. That a tool failed has no place of its own in a conversation: the text says it."""
    try:
        content = ResultBody.model_validate({"content": block.content}).content
    except ValidationError:
        where = f"{where}.content"
        raise InvalidRequest(f"{where}: should be a text or a list of content blocks", param=where) from None
    images: list[Part] = []
    if not isinstance(content, str):
        found = [_part(each, f"{where}.content[{index}]", "tool") for index, each in enumerate(content or ())]
        images = [part for part in found if not isinstance(part, TextPart)]
        content = "\n".join(part.text for part in found if isinstance(part, TextPart))
    return (*_parts(f"Error: {content}" if block.is_error else content), *images)


def _assistant(blocks: list[Block], where: str) -> Message:
    """Thoughts that only the service which wrote them can read (``redacted_thinking``) are left out."""
    parts: list[Part] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block.type == "thinking":
            thoughts.append(required(block.thinking, f"{place}.thinking"))
        elif block.type == "tool_use":
            name: str = required(block.name, f"{place}.name")
            arguments = required(block.input, f"{place}.input")
            calls.append(ToolCall(required(block.id, f"{place}.id"), name, arguments))
        elif block.type != "redacted_thinking":
            parts.append(_part(block, place, "assistant"))
    return Message(
        role="assistant",
        content=tuple(parts),
        reasoning="\n\n".join(filter(None, thoughts)) or None,
        tool_calls=tuple(calls),
    )


def _parts(text: str) -> tuple[Part, ...]:
    return (TextPart(text),) if text else ()


def _part(block: Block, where: str, role: str) -> Part:
    if block.type != "image":
        return TextPart(_text(block, where))
    may_show(role, where)
    where = f"{where}.source"
    source: ImageSource = required(block.source, where)
    if source.type == "base64":
        data: str = required(source.data, f"{where}.data")
        kind: str = required(source.media_type, f"{where}.media_type")
        return image_part(f"data:{kind};base64,{data}", where)
    if source.type == "url":
        return image_part(required(source.url, f"{where}.url"), f"{where}.url")
    raise InvalidRequest(f"{where}.type: only base64 is supported", param=f"{where}.type")


def _text(block: Block, where: str) -> str:
    if block.type == "image":  # users' and tools' are no text
        may_show("system", where)
    if block.type != "text":
        raise unknown_part(block.type, where)
    text: str = required(block.text, f"{where}.text")
    return text
