"""From the bodies of OpenAI's API to plain values: what each field means, and what is refused.

Every fault is an ``InvalidRequest`` that names the field. What would change the answer and
is not supported is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any, Literal

from pydantic_core import from_json

from darkbloom_core.contracts import (
    AnswerFormat,
    Chat,
    JsonText,
    LarkText,
    Message,
    Part,
    RegexText,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.server._bodies import (
    ChatCompletionBody,
    ChatMessage,
    CompletionBody,
    ContentPart,
    FunctionCall,
    GenerationBody,
    HistoricToolCall,
    JsonSchemaFormat,
    NamedToolChoice,
    ResponseFormat,
    ToolEntry,
)
from darkbloom_core.server._requests import AnswerRequest, SamplingOverrides, asked_media

COMPLETION_DEFAULT_TOKENS = 16
"""What ``max_tokens`` of a text completion is if absent; OpenAI's API documents it so."""

_MEDIA = {"image": "images other than image_url", "input_image": "images other than image_url"}
_MEDIA |= {"video": "videos other than video_url", "input_video": "videos other than video_url"}
_MEDIA |= {"audio": "audio", "input_audio": "audio", "audio_url": "audio", "file": "files"}


def chat_request(body: ChatCompletionBody, today: date) -> AnswerRequest:
    """What a chat completion asks for."""
    _refuse(body, "functions", "function_call", instead="tools and tool_choice")
    _refuse(body, "audio", "web_search_options")
    if body.modalities is not None and set(body.modalities) - {"text"}:
        raise InvalidRequest("modalities: only text can be generated", param="modalities")
    tools = _tools(body.tools or [])
    tool_choice, named_tool = _tool_choice(body, tools)
    chat = Chat(
        messages=tuple(_message(message, index) for index, message in enumerate(body.messages)),
        tools=tools,
        tool_choice=tool_choice,
        named_tool=named_tool,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        answer=_answer_format(body.response_format),
        today=today,
    )
    return _request(body, chat, _chat_max_tokens(body), _chat_logprobs(body))


def _answer_format(asked: ResponseFormat | None) -> AnswerFormat | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return AnswerFormat(text=JsonText({"type": "object"}, "response_format"))
    if asked.type == "json_schema":
        if asked.json_schema is None:
            raise _required("response_format.json_schema")
        return _json_schema_format(asked.json_schema)
    if asked.grammar is None:
        raise _required("response_format.grammar")
    where, definition = "response_format.grammar.definition", asked.grammar.definition
    if asked.grammar.syntax == "lark":
        return AnswerFormat(text=LarkText(definition, where))
    return AnswerFormat(text=RegexText(definition, where))


def _json_schema_format(asked: JsonSchemaFormat) -> AnswerFormat:
    schema = {"type": "object"} if asked.json_schema is None else asked.json_schema
    text = JsonText(schema, "response_format.json_schema.schema", lenient=asked.strict is not True)
    return AnswerFormat(text=text, name=asked.name, description=asked.description or "")


def _required(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: field required", param=where)


def completion_request(body: CompletionBody) -> AnswerRequest:
    """What a text completion asks for."""
    for name in ("echo", "suffix"):
        if getattr(body, name):
            raise InvalidRequest(f"{name}: not supported for text completions", param=name)
    if body.response_format is not None and body.response_format.type != "text":
        message = "response_format: only text is supported for text completions"
        raise InvalidRequest(message, param="response_format")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of: not supported; it may only equal n", param="best_of")
    prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    max_tokens = COMPLETION_DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    return _request(body, prompt, max_tokens, body.logprobs)


def _request(
    body: GenerationBody, source: Chat | str, max_tokens: int | None, logprobs: int | None
) -> AnswerRequest:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    options = body.stream_options
    return AnswerRequest(
        model=body.model,
        source=source,
        max_tokens=max_tokens,
        sampling=SamplingOverrides(
            temperature=body.temperature,
            top_k=0 if body.top_k == -1 else body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=None if body.logit_bias is None else _logit_bias(body.logit_bias),
            seed=body.seed,
            logprobs=logprobs,
        ),
        stop=tuple(dict.fromkeys(stop)),
        choices=body.n or 1,
        streamed=body.stream is True,
        include_usage=options is not None and options.include_usage is True,
        cache_key=body.prompt_cache_key,
    )


def _refuse(body: ChatCompletionBody, *names: str, instead: str | None = None) -> None:
    for name in names:
        if getattr(body, name) is not None:
            advice = f"; use {instead}" if instead else ""
            raise InvalidRequest(f"{name}: not supported{advice}", param=name)


def _chat_max_tokens(body: ChatCompletionBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens mean the same, but differ; send one of them",
            param="max_tokens",
        )
    return old if new is None else new


def _chat_logprobs(body: ChatCompletionBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return None


def _logit_bias(given: Mapping[str, Any]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest("logit_bias: keys must be token ids", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidRequest("logit_bias: values must be numbers from -100 to 100", param="logit_bias")
        bias[int(key)] = float(value)
    return bias


def _tools(entries: list[ToolEntry]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(entries):
        function = entry.function
        if function.name in tools:
            raise InvalidRequest(
                f"tools[{index}].function.name: two tools have the same name",
                param=f"tools[{index}].function.name",
            )
        tools[function.name] = Tool(
            name=function.name,
            description=function.description or "",
            parameters=function.parameters or {},
            strict=function.strict is True,
            origin=f"tools[{index}].function.parameters",
        )
    return tuple(tools.values())


def _tool_choice(body: ChatCompletionBody, tools: tuple[Tool, ...]) -> tuple[ToolChoice, str | None]:
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in {tool.name for tool in tools}:
            raise InvalidRequest(
                "tool_choice.function.name: no such tool in tools", param="tool_choice.function.name"
            )
        return "required", name
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice: a tool is required, but tools is empty", param="tool_choice")
    return choice or "auto", None


def _message(message: ChatMessage, index: int) -> Message:
    where = f"messages[{index}]"
    if message.function_call is not None:
        raise InvalidRequest(
            f"{where}.function_call: not supported; use tool_calls", param=f"{where}.function_call"
        )
    if message.role != "assistant":
        if message.content is None:
            raise InvalidRequest(f"{where}.content: field required", param=f"{where}.content")
        if message.tool_calls:
            raise InvalidRequest(
                f"{where}.tool_calls: only an assistant message has tool calls", param=f"{where}.tool_calls"
            )
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{where}.tool_call_id: field required", param=f"{where}.tool_call_id")
    return Message(
        role=message.role,
        content=_content(message, f"{where}.content"),
        reasoning=message.reasoning_content or None,
        tool_calls=tuple(
            _tool_call(call, f"{where}.tool_calls[{position}].function.arguments")
            for position, call in enumerate(message.tool_calls or [])
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _content(message: ChatMessage, where: str) -> tuple[Part, ...]:
    if message.content is None:
        return ()
    if isinstance(message.content, str):
        return (TextPart(message.content),) if message.content else ()
    return tuple(
        _part(part, f"{where}[{position}]", message.role) for position, part in enumerate(message.content)
    )


def _part(part: ContentPart, where: str, role: str) -> Part:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type in ("text", "refusal"):
        if text is None:
            raise InvalidRequest(f"{where}.{part.type}: field required", param=f"{where}.{part.type}")
        return TextPart(text)
    if part.type in ("image_url", "video_url"):
        return _media(part, where, role)
    if part.type in _MEDIA:
        raise InvalidRequest(f"{where}: this model does not accept {_MEDIA[part.type]}", param=where)
    raise InvalidRequest(f"{where}.type: unknown type of content", param=f"{where}.type")


def _media(part: ContentPart, where: str, role: str) -> Part:
    if role not in ("user", "tool"):
        raise InvalidRequest(f"{where}: a message of the role {role} cannot hold pictures", param=where)
    kind: Literal["image", "video"] = "image" if part.type == "image_url" else "video"
    given = part.image_url if kind == "image" else part.video_url
    where = f"{where}.{part.type}"
    if given is None:
        raise InvalidRequest(f"{where}: field required", param=where)
    return (
        asked_media(kind, given, where)
        if isinstance(given, str)
        else asked_media(kind, given.url, f"{where}.url")
    )


def _tool_call(call: HistoricToolCall, where: str) -> ToolCall:
    return ToolCall(id=call.id, name=call.function.name, arguments=_arguments(call.function, where))


def _arguments(function: FunctionCall, where: str) -> Mapping[str, Any]:
    """Arguments as an object. No text at all is what models and clients write for none."""
    if not isinstance(function.arguments, str):
        return function.arguments
    if not function.arguments.strip():
        return {}
    try:
        value = from_json(function.arguments, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not valid JSON: {error}", param=where) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: must be a JSON object", param=where)
    return value
