"""The shape of a harmony output, for answers that must fit a format and for calls that must be made.

Always true: what is constrained is the body of the final message or of a call; thoughts and
remarks before it are free text. Calls may name their recipient in either place.
"""

from __future__ import annotations

from collections.abc import Mapping

from darkbloom_core.contracts import (
    AnyText,
    Chat,
    ControlToken,
    Exactly,
    Grammar,
    InOrder,
    OneOf,
    Repeated,
    Tool,
)
from darkbloom_core.errors import InvalidRequest
from darkbloom_gpt_oss._parser import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START


def output_grammar(chat: Chat, ids: Mapping[str, ControlToken]) -> Grammar | None:
    """What may follow the prompt, which has begun a message of the assistant; None if anything may."""
    if not chat.is_constrained:
        return None
    if chat.tool_choice == "required" and not chat.callable_tools:
        raise InvalidRequest("tool_choice: no tool that could be called is offered", param="tool_choice")
    last: list[Grammar] = [_call(chat, tool, ids) for tool in chat.callable_tools]
    if chat.tool_choice != "required":
        last.append(_final(chat, ids))
    free = _message(OneOf((Exactly("analysis"), Exactly("commentary"))), AnyText(), END, ids)
    another = InOrder((free, ids[START], Exactly("assistant")))
    return InOrder((Repeated(another), OneOf(tuple(last))))


def _final(chat: Chat, ids: Mapping[str, ControlToken]) -> Grammar:
    if chat.answer is None:
        return _message(Exactly("final"), AnyText(), RETURN, ids)
    typed = InOrder((Exactly("final "), ids[CONSTRAIN], Exactly("json")))
    return _message(OneOf((Exactly("final"), typed)), chat.answer.text, RETURN, ids)


def _call(chat: Chat, tool: Tool, ids: Mapping[str, ControlToken]) -> Grammar:
    to = f"to=functions.{tool.name}"
    typed = InOrder((Exactly(" "), ids[CONSTRAIN], Exactly("json")))
    kind = OneOf((typed, Exactly(" json")))
    header = OneOf(
        (
            InOrder((ids[CHANNEL], Exactly(f"commentary {to}"), kind)),
            InOrder((Exactly(f" {to}"), ids[CHANNEL], Exactly("commentary"), kind)),
        )
    )
    return InOrder((header, ids[MESSAGE], chat.arguments_of(tool), ids[CALL]))


def _message(header: Grammar, body: Grammar, end: str, ids: Mapping[str, ControlToken]) -> Grammar:
    return InOrder((ids[CHANNEL], header, ids[MESSAGE], body, ids[end]))
