"""Text of one checkpoint: conversations to token ids, and which tokens are structure.

The checkpoint's own chat template decides the text of a prompt. What a client wrote never
becomes a control token: ``ChatTemplate`` sees to that, given the right list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import ChatTemplate, TextTokenizer, TokenizerCodec
from darkbloom_core.contracts import Chat, Grammar, MediaPart, Message, OutputParser, Prompt, Tool
from darkbloom_core.errors import InvalidRequest
from darkbloom_qwen3._parser import CALL, CALL_END, THINK, THINK_END, Qwen3Parser

# Qwen's tokenizer calls only some of its control tokens special. These are structure all the same.
_STRUCTURE = (THINK, THINK_END, CALL, CALL_END, "<tool_response>", "</tool_response>")

_PROBE = ({"role": "user", "content": "hello"},)


class Qwen3Codec(TokenizerCodec):
    """Matches ``darkbloom_core.contracts.ChatCodec`` by having its members, half of them inherited. Thread-safe."""

    def __init__(self, path: Path) -> None:
        super().__init__(TextTokenizer(path, control_names=_STRUCTURE))
        self._template = ChatTemplate(path, self.tokenizer)
        self._tags = {self.tokenizer.control_id(name): name for name in (THINK, THINK_END, CALL, CALL_END)}
        # Some checkpoints always think: their template opens the thought itself, so the model's
        # output begins inside it. Whether this one does is seen from a prompt, once.
        self._opens_thought = {quiet: self._ends_in_thought(quiet) for quiet in (False, True)}

    def encode_chat(self, chat: Chat) -> Prompt:
        """Render ``chat``. What the format has no place for is refused, not left out."""
        if chat.tool_choice == "required":
            raise InvalidRequest(
                "tool_choice required: this model cannot be made to call a tool", param="tool_choice"
            )
        if chat.tools and not chat.parallel_tool_calls:
            raise InvalidRequest(
                "parallel_tool_calls: this model cannot be kept to one call", param="parallel_tool_calls"
            )
        if _is_quiet(chat) and self._opens_thought[True]:
            raise InvalidRequest("reasoning_effort: this model always reasons", param="reasoning_effort")
        messages = [_message(message) for message in _in_order_of_calls(chat.messages)]
        tools = [_tool(tool) for tool in chat.tools] if chat.tool_choice == "auto" else []
        variables = _variables(messages, tools, quiet=_is_quiet(chat))
        return Prompt(self._template.render(variables, today=chat.today))

    def grammar(self, chat: Chat) -> Grammar | None:
        """Nothing but free answers so far, so whatever would need more is refused."""
        if chat.answer is not None:
            where = chat.answer.text.origin
            raise InvalidRequest(f"{where}: this model answers in free text", param=where)
        return None

    def parser(self, chat: Chat) -> OutputParser:
        """A fresh parser: it holds the state of one answer."""
        return Qwen3Parser(self._tags, begins_in_thought=self._opens_thought[_is_quiet(chat)])

    def _ends_in_thought(self, quiet: bool) -> bool:
        tags = [self._tags.get(token) for token in self._template.render(_variables(_PROBE, (), quiet=quiet))]
        return THINK in tags and THINK_END not in tags


def _is_quiet(chat: Chat) -> bool:
    """Whether the client asked for no reasoning. Other words of effort mean nothing to these models."""
    return chat.reasoning_effort == "none"


def _variables(messages: object, tools: object, *, quiet: bool) -> dict[str, Any]:
    """What Qwen3's templates look at, in the shapes that they expect."""
    variables = {"messages": messages, "tools": tools, "add_generation_prompt": True}
    return {**variables, "enable_thinking": False} if quiet else variables


def _in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The format shows the results of calls without their ids, so their order must be that of the calls."""
    places: dict[str, int] = {}
    turn, keyed = 0, []
    for message in messages:
        if message.role != "tool":
            places = {call.id: place for place, call in enumerate(message.tool_calls, start=1)}
            turn += 1
        elif message.tool_call_id not in places:
            raise InvalidRequest(
                "messages: a tool message answers no call of the turn before", param="messages"
            )
        keyed.append((turn, places.get(message.tool_call_id or "", 0), message))
    return [message for _, _, message in sorted(keyed, key=lambda entry: entry[:2])]


def _message(message: Message) -> dict[str, Any]:
    if any(isinstance(part, MediaPart) for part in message.content):
        raise InvalidRequest("messages: this model reads text only", param="messages")
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": message.text}
    if message.reasoning is not None:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return rendered


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
