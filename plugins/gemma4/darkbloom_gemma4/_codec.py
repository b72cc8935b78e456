"""Talking to Gemma 4: conversations through the checkpoint's own template, output through ``Gemma4Parser``.

What the template expects of its input, and has no place for, is known here; the text of a
prompt is the template's alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import ChatTemplate, TokenizerCodec
from darkbloom_core.contracts import Chat, ControlToken, Grammar, Message, OutputParser, Prompt, ToolCall
from darkbloom_core.errors import InvalidRequest
from darkbloom_gemma4._grammar import output_grammar
from darkbloom_gemma4._parser import Gemma4Parser
from darkbloom_gemma4._placeholders import Placeholders, has_media, template_content
from darkbloom_gemma4._tokens import CONTROL_NAMES, END_OF_TURN, TURN, read_tokenizer

THINKS = {"none": False, "minimal": False, "low": True, "medium": True, "high": True, "xhigh": True}
"""What a client's reasoning effort means: this model thinks, or it does not."""

_NEEDED = (TURN, END_OF_TURN)


class Gemma4Codec(TokenizerCodec):
    """The family's ``ChatCodec``. Raises ``CheckpointError`` if the tokenizer lacks the tokens of turns."""

    def __init__(self, path: Path) -> None:
        super().__init__(read_tokenizer(path))
        self._template = ChatTemplate(path, self.tokenizer)
        for name in _NEEDED:
            self.tokenizer.require_control_id(name)
        self._names = {
            token: name for name in CONTROL_NAMES if (token := self.tokenizer.control_id(name)) is not None
        }
        self._controls = {name: ControlToken(token) for token, name in self._names.items()}

    def encode_chat(self, chat: Chat) -> Prompt:
        """Up to the model's turn."""
        variables: dict[str, Any] = {
            "messages": list(_template_messages(chat.messages)),
            "add_generation_prompt": True,
            "enable_thinking": _thinks(chat),
        }
        if chat.tools and chat.tool_choice != "none":
            variables["tools"] = [
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
        media = Placeholders(self.tokenizer, chat.messages) if has_media(chat.messages) else None
        ids = self._template.render(variables, today=chat.today, edit=None if media is None else media.expand)
        return Prompt(ids, () if media is None else media.spans(ids))

    def grammar(self, chat: Chat) -> Grammar | None:
        return output_grammar(chat, self._controls)

    def parser(self, chat: Chat) -> OutputParser:
        return Gemma4Parser(self._names, frozenset(tool.name for tool in chat.callable_tools))


def _thinks(chat: Chat) -> bool:
    if chat.reasoning_effort is None:
        return False
    try:
        return THINKS[chat.reasoning_effort]
    except KeyError:
        raise InvalidRequest(
            f"reasoning effort {chat.reasoning_effort!r} is not one of {', '.join(THINKS)}",
            param="reasoning_effort",
        ) from None


def _template_messages(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The conversation in the template's terms: instructions once and first, results of tools with their calls."""
    if not messages:
        raise InvalidRequest("there are no messages", param="messages")
    instructions = 0
    while instructions < len(messages) and messages[instructions].role in ("system", "developer"):
        instructions += 1
    if instructions:
        texts = [_text(message) for message in messages[:instructions]]
        yield {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    position = instructions
    while position < len(messages):
        message = messages[position]
        position += 1
        if message.role == "tool":
            raise InvalidRequest("a tool message does not follow a tool call", param="messages")
        if message.role != "assistant":
            is_user = message.role == "user"
            content = template_content(message) if is_user else _text(message)
            yield {"role": "user" if is_user else "system", "content": content}
            continue
        results: list[Message] = []
        while message.tool_calls and position < len(messages) and messages[position].role == "tool":
            results.append(messages[position])
            position += 1
        yield _assistant_message(message, results)


def _assistant_message(message: Message, results: Sequence[Message]) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": "assistant", "content": _text(message)}
    if message.reasoning:
        rendered["reasoning"] = rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if results:
        rendered["tool_responses"] = [
            {"name": _called(result, message.tool_calls).name, "response": _response(result.text)}
            for result in results
        ]
    return rendered


def _called(result: Message, calls: Sequence[ToolCall]) -> ToolCall:
    for call in calls:
        if call.id == result.tool_call_id:
            return call
    raise InvalidRequest(
        f"tool_call_id {result.tool_call_id!r} belongs to no tool call of the message before it",
        param="messages",
    )


def _response(text: str) -> Any:
    """A JSON object becomes one in the format's own syntax; anything else stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _text(message: Message) -> str:
    if has_media((message,)):
        raise InvalidRequest(
            f"a message of the role {message.role!r} cannot hold pictures; users' and tools' messages can",
            param="messages",
        )
    return message.text
