"""What the outputs of a request must be. Lives on the server's event loop.

Always true: what a client's schemas take to be read and compiled is taken from other
threads, and never from more than a few at once, so it holds nobody else up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from darkbloom_core.contracts import Chat, ChatCodec, ClientText, Grammar
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.grammar import COMPILATIONS_AT_ONCE, CompiledGrammar, check_bounds

if TYPE_CHECKING:
    from darkbloom_core.slots import Slot


class OutputGrammars:
    def __init__(self) -> None:
        self._compiling = asyncio.Semaphore(COMPILATIONS_AT_ONCE)

    async def compiled(self, source: Chat | str, slot: Slot) -> CompiledGrammar | None:
        """None if any output would do. Raises ``InvalidRequest``."""
        if isinstance(source, str):
            return None
        if source.answer is None and not source.tools:
            grammar = _grammar(source, slot.codec)
        else:
            grammar = await asyncio.to_thread(_grammar, source, slot.codec)
        if grammar is None:
            return None
        async with self._compiling:
            return await asyncio.to_thread(slot.grammars.compile, grammar)


def _grammar(chat: Chat, codec: ChatCodec) -> Grammar | None:
    """As the family says it; it is asked only about schemas that are not too large or complex."""
    texts: list[ClientText] = [] if chat.answer is None else [chat.answer.text]
    if chat.is_constrained or not chat.parallel_tool_calls:
        texts += map(chat.arguments_of, chat.callable_tools)
    check_bounds(texts)
    grammar = codec.grammar(chat)
    if grammar is not None:
        return grammar
    if chat.answer is not None:
        where = chat.answer.text.origin
        raise InvalidRequest(f"{where}: this model cannot be kept to a format", param=where)
    if chat.tool_choice == "required":
        raise InvalidRequest("tool_choice: this model cannot be made to call a tool", param="tool_choice")
    return None
