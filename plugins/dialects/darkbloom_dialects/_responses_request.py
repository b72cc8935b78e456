"""From a body of the Responses API to plain values: what each field means, and what is refused.

Every fault is an ``InvalidRequest`` that names the field. Items that belong to one turn of
the model (its thoughts, its text, its calls) become one message.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from pydantic_core import from_json

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
from darkbloom_dialects._bodies import distinct_tools, image_part, may_show, refuse, required, unknown_part
from darkbloom_dialects._responses_bodies import ContentPart, InputItem, NamedToolChoice, ResponsesBody

MAX_NOTES = 16
MAX_NOTE_CHARACTERS = 512

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """``items`` is everything that the model is shown but the instructions; ``items_bytes`` its length as JSON.

    ``owner`` is the name of the API key that it was asked with.
    """

    request: AnswerRequest
    body: ResponsesBody
    items: tuple[InputItem, ...]
    items_bytes: int
    owner: str | None = None


def asked_response(
    body: ResponsesBody,
    earlier: Sequence[InputItem],
    today: date,
    items_bytes: int,
    owner: str | None = None,
) -> AskedResponse:
    """What ``POST /v1/responses`` asks for, going on from the items ``earlier``."""
    _refuse(body)
    given = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    items = [_named(item, f"input[{index}]") for index, item in enumerate(given)]
    places = [*("previous_response_id" for _ in earlier), *(f"input[{index}]" for index in range(len(given)))]
    tools = distinct_tools(
        Tool(
            name=tool.name,
            description=tool.description or "",
            parameters=tool.parameters or {},
            strict=tool.strict is True,
            origin=f"tools[{index}].parameters",
        )
        for index, tool in enumerate(body.tools or ())
    )
    tool_choice, named_tool = _tool_choice(body, tools)
    instructions = Message(role="system", content=_parts(body.instructions or ""))
    everything = (*earlier, *items)
    chat = Chat(
        messages=(
            *([instructions] if body.instructions else ()),
            *_messages(zip(everything, places, strict=True)),
        ),
        tools=tools,
        tool_choice=tool_choice,
        named_tool=named_tool,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        answer=_answer_format(body),
        today=today,
    )
    request = AnswerRequest(
        model=body.model,
        source=chat,
        max_tokens=body.max_output_tokens,
        sampling=SamplingOverrides(temperature=body.temperature, top_p=body.top_p),
        streamed=body.stream is True,
        cache_key=body.prompt_cache_key,
    )
    return AskedResponse(request, body, everything, items_bytes, owner)


def output_items(output: Iterable[Mapping[str, Any]]) -> Iterator[InputItem]:
    """The items of a response's output, as a later request shows them to the model again.

    A model may have written arguments that are no JSON object; they are kept as one text.
    """
    for each in output:
        item = InputItem.model_validate(dict(each))
        if item.type == "function_call" and _object(item.arguments or "") is None:
            arguments = {"arguments": item.arguments}
            item = item.model_copy(update={"arguments": json.dumps(arguments)})
        yield item


def _refuse(body: ResponsesBody) -> None:
    refuse(body, "background", "conversation", "prompt", "top_logprobs")
    for index, name in enumerate(body.include or ()):
        if name != "reasoning.encrypted_content":  # thoughts are there in the clear
            raise InvalidRequest(f"include[{index}]: not supported", param=f"include[{index}]")
    metadata = body.metadata or {}
    if len(metadata) > MAX_NOTES or not all(map(_is_note, (*metadata, *metadata.values()))):
        message = f"metadata: should be up to {MAX_NOTES} texts of up to {MAX_NOTE_CHARACTERS} characters"
        raise InvalidRequest(message, param="metadata")


def _answer_format(body: ResponsesBody) -> AnswerFormat | None:
    asked = None if body.text is None else body.text.format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return AnswerFormat(text=JsonText({"type": "object"}, "text.format"))
    name: str = required(asked.name, "text.format.name")
    schema = required(asked.json_schema, "text.format.schema")
    text = JsonText(schema, "text.format.schema", lenient=asked.strict is not True)
    return AnswerFormat(text=text, name=name, description=asked.description or "")


def _is_note(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NOTE_CHARACTERS


def _named(item: InputItem, where: str) -> InputItem:
    """``item`` with an id, and its text as a part."""
    if item.type not in _PREFIXES:
        raise InvalidRequest(f"{where}.type: unknown type of item", param=f"{where}.type")
    content = item.content
    if item.type == "message" and isinstance(content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        content = [ContentPart(type=kind, text=content)]
    name = item.id or f"{_PREFIXES[item.type]}_{secrets.token_hex(12)}"
    return item.model_copy(update={"id": name, "content": content})


def _tool_choice(body: ResponsesBody, tools: tuple[Tool, ...]) -> tuple[ToolChoice, str | None]:
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        if choice.name not in {tool.name for tool in tools}:
            raise InvalidRequest("tool_choice.name: no such tool in tools", param="tool_choice.name")
        return "required", choice.name
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice: a tool is required, but tools is empty", param="tool_choice")
    return choice or "auto", None


class _Turn:
    """One turn of the model, put together from its items."""

    def __init__(self) -> None:
        self.content: tuple[Part, ...] = ()
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []

    def ends_before(self, item: InputItem) -> bool:
        """Whether ``item`` begins the next turn: text was the last word, unless calls came with it."""
        return bool(self.content) and not self.calls and item.type != "function_call"

    def message(self) -> Message:
        return Message(
            role="assistant",
            content=self.content,
            reasoning="\n\n".join(self.thoughts) or None,
            tool_calls=tuple(self.calls),
        )


def _messages(items: Iterable[tuple[InputItem, str]]) -> Iterator[Message]:
    turn: _Turn | None = None
    for item, where in items:
        of_model = item.type in ("reasoning", "function_call") or item.role == "assistant"
        if turn is not None and (not of_model or turn.ends_before(item)):
            yield turn.message()
            turn = None
        if of_model:
            turn = turn or _Turn()
            _add(turn, item, where)
        elif item.type == "function_call_output":
            call: str = required(item.call_id, f"{where}.call_id")
            output = required(item.output, f"{where}.output")
            parts = _content(output, f"{where}.output", "tool")
            yield Message(role="tool", content=parts, tool_call_id=call)
        else:
            role = required(item.role, f"{where}.role")
            content = required(item.content, f"{where}.content")
            yield Message(role=role, content=_content(content, f"{where}.content", role))
    if turn is not None:
        yield turn.message()


def _add(turn: _Turn, item: InputItem, where: str) -> None:
    if item.type == "reasoning":
        place = "content" if item.content else "summary"
        parts = _content(getattr(item, place) or "", f"{where}.{place}", "assistant")
        thought = "\n\n".join(part.text for part in parts if isinstance(part, TextPart) and part.text)
        turn.thoughts += [thought] if thought else []
    elif item.type == "function_call":
        call: str = required(item.call_id, f"{where}.call_id")
        name: str = required(item.name, f"{where}.name")
        arguments = _object(required(item.arguments, f"{where}.arguments"))
        if arguments is None:
            raise InvalidRequest(f"{where}.arguments: must be a JSON object", param=f"{where}.arguments")
        turn.calls.append(ToolCall(call, name, arguments))
    else:
        content = required(item.content, f"{where}.content")
        turn.content = (*turn.content, *_content(content, f"{where}.content", "assistant"))


def _content(content: str | Sequence[ContentPart], where: str, role: str) -> tuple[Part, ...]:
    if isinstance(content, str):
        return _parts(content)
    return tuple(_part(part, f"{where}[{index}]", role) for index, part in enumerate(content))


def _part(part: ContentPart, where: str, role: str) -> Part:
    if part.type == "input_image":
        may_show(role, where)
        if part.file_id is not None:
            raise InvalidRequest(f"{where}.file_id: not supported; send image_url", param=f"{where}.file_id")
        where = f"{where}.image_url"
        return image_part(required(part.image_url, where), where)
    if part.type == "refusal":
        return TextPart(required(part.refusal, f"{where}.refusal"))
    if part.type not in _TEXTS:
        raise unknown_part(part.type, where)
    return TextPart(required(part.text, f"{where}.text"))


def _parts(text: str) -> tuple[Part, ...]:
    return (TextPart(text),) if text else ()


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is, None if it is none. No text at all is what models write for none."""
    if not text.strip(" \t\r\n"):
        return {}
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
