"""The shape of an output, for answers that must fit a format and for calls that must be made.

Always true: what is constrained is the answer's text or a call's arguments; thoughts, and
text before a call, are free.
"""

from __future__ import annotations

from collections.abc import Mapping

from darkbloom_core.contracts import AnyText, Chat, ControlToken, Exactly, Grammar, InOrder, OneOf, Repeated
from darkbloom_core.errors import InvalidRequest
from darkbloom_gemma4 import _tokens as tokens
from darkbloom_gemma4._arguments import arguments_grammar


def output_grammar(chat: Chat, ids: Mapping[str, ControlToken]) -> Grammar | None:
    """What may follow the prompt; None if anything may. ``ids`` are the control tokens by name."""
    callable_tools = chat.callable_tools
    if not chat.is_constrained and (chat.parallel_tool_calls or not callable_tools):
        return None
    required = chat.tool_choice == "required"
    if required and not callable_tools:
        raise InvalidRequest("tool_choice: no tool that could be called is offered", param="tool_choice")
    text = AnyText() if chat.answer is None else chat.answer.text
    options: list[Grammar] = [] if required else [InOrder((text, ids[tokens.END_OF_TURN]))]
    if callable_tools:
        calls = _calls(chat, ids)
        before = [] if required or chat.answer is not None else [AnyText()]
        options.append(InOrder((*before, calls)))
    thought: list[Grammar] = []
    if tokens.CHANNEL in ids:
        name = Exactly("thought\n")
        whole = InOrder((ids[tokens.CHANNEL], name, AnyText(), ids[tokens.END_OF_CHANNEL]))
        thought.append(Repeated(whole, most=1))
    return InOrder((*thought, OneOf(tuple(options))))


def _calls(chat: Chat, ids: Mapping[str, ControlToken]) -> Grammar:
    opening, quote = ids[tokens.CALL], ids.get(tokens.QUOTE)
    tools = tuple(
        InOrder((Exactly(f"call:{tool.name}"), arguments_grammar(chat.arguments_of(tool), quote)))
        for tool in chat.callable_tools
    )
    call = InOrder((opening, OneOf(tools), ids[tokens.END_OF_CALL]))
    ends = tuple(ids[name] for name in (tokens.RESPONSE, tokens.END_OF_TURN) if name in ids)
    return InOrder((Repeated(call, 1, None if chat.parallel_tool_calls else 1), OneOf(ends)))
