"""Talking to GPT-OSS: conversations through the checkpoint's harmony template.

What the template expects of its input, and has no place for, is known here; the text of a
prompt is the template's alone. The format: https://github.com/openai/harmony
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import ChatTemplate, TextTokenizer, TokenizerCodec
from darkbloom_core.contracts import (
    AnswerFormat,
    Chat,
    ControlToken,
    Grammar,
    JsonText,
    MediaPart,
    Message,
    OutputParser,
    Prompt,
    ToolCall,
)
from darkbloom_core.errors import InvalidRequest
from darkbloom_gpt_oss._grammar import output_grammar
from darkbloom_gpt_oss._parser import CONTROL_NAMES, HarmonyParser

REASONING_EFFORTS = ("low", "medium", "high")


class HarmonyCodec(TokenizerCodec):
    """The family's ``ChatCodec``. Raises ``CheckpointError`` if the tokenizer lacks a harmony token."""

    def __init__(self, path: Path) -> None:
        super().__init__(TextTokenizer(path))
        self._template = ChatTemplate(path, self.tokenizer)
        self._names = {self.tokenizer.require_control_id(name): name for name in CONTROL_NAMES}
        self._controls = {name: ControlToken(token) for token, name in self._names.items()}

    def encode_chat(self, chat: Chat) -> Prompt:
        """Up to ``<|start|>assistant``: the model goes on with the channel of its first message."""
        variables: dict[str, Any] = {
            "messages": list(_template_messages(chat.messages, _response_format(chat.answer))),
            "add_generation_prompt": True,
        }
        if offered := _tools(chat):
            variables["tools"] = offered
        if chat.reasoning_effort is not None:
            if chat.reasoning_effort not in REASONING_EFFORTS:
                raise InvalidRequest(
                    f"reasoning effort {chat.reasoning_effort!r} is not one of {', '.join(REASONING_EFFORTS)}",
                    param="reasoning_effort",
                )
            variables["reasoning_effort"] = chat.reasoning_effort
        return Prompt(self._template.render(variables, today=chat.today))

    def grammar(self, chat: Chat) -> Grammar | None:
        return output_grammar(chat, self._controls)

    def parser(self, chat: Chat) -> OutputParser:
        return HarmonyParser(self._names, frozenset(tool.name for tool in chat.callable_tools))


def _tools(chat: Chat) -> list[dict[str, Any]]:
    """The tools that the model is shown, as templates expect them."""
    if chat.tool_choice == "none":
        return []
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in chat.tools
    ]


def _response_format(answer: AnswerFormat | None) -> str:
    """How the format tells the model what its answer must be; '' if it is not told."""
    if answer is None or not answer.name or not isinstance(answer.text, JsonText):
        return ""
    description = f"// {answer.description}\n" if answer.description else ""
    schema = json.dumps(answer.text.schema, ensure_ascii=False, separators=(",", ":"))
    return f"# Response Formats\n\n## {answer.name}\n\n{description}{schema}"


def _template_messages(messages: Sequence[Message], response_format: str) -> Iterator[dict[str, Any]]:
    """The conversation in the template's terms: instructions once and first, each call followed by its result."""
    instructions = 0
    while instructions < len(messages) and messages[instructions].role in ("system", "developer"):
        instructions += 1
    if instructions or response_format:
        texts = [*(_text(message) for message in messages[:instructions]), response_format]
        yield {"role": "developer", "content": "\n\n".join(text for text in texts if text)}
    position = instructions
    while position < len(messages):
        message = messages[position]
        position += 1
        if message.role == "user":
            yield {"role": "user", "content": _text(message)}
        elif message.role == "assistant" and message.tool_calls:
            results: list[Message] = []
            while position < len(messages) and messages[position].role == "tool":
                results.append(messages[position])
                position += 1
            yield from _calls(message, results)
        elif message.role == "assistant":
            yield {"role": "assistant", "content": _text(message)}
        elif message.role == "tool":
            raise InvalidRequest(
                "a tool message must follow the assistant message that called the tool", param="messages"
            )
        else:
            raise InvalidRequest(
                f"a {message.role} message must come before the conversation, this format has no place for it"
                " later on",
                param="messages",
            )


def _calls(message: Message, results: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The model calls one tool at a time: several calls of one turn become several turns.

    Thoughts, and text that came before the calls, are kept with the first one; the
    template drops them itself once the turn is over.
    """
    answers = {result.tool_call_id: result for result in results}
    if len(answers) < len(results) or answers.keys() - {call.id for call in message.tool_calls}:
        raise InvalidRequest(
            "each tool message must answer, by tool_call_id, one call of the assistant message before it",
            param="messages",
        )
    thoughts = "\n\n".join(text for text in (message.reasoning or "", _text(message)) if text)
    for call in message.tool_calls:
        yield _call(call, thoughts)
        thoughts = ""
        if call.id in answers:
            yield {"role": "tool", "content": _result(_text(answers[call.id]))}


def _call(call: ToolCall, thoughts: str) -> dict[str, Any]:
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        ],
    }
    if thoughts:
        turn["thinking"] = thoughts
    return turn


def _result(text: str) -> Any:
    """Templates write a result as JSON, so one that is a JSON object or list already is handed over as such."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (dict, list)) else text


def _text(message: Message) -> str:
    if any(isinstance(part, MediaPart) for part in message.content):
        raise InvalidRequest("this model reads text only, no images or videos", param="messages")
    return message.text
