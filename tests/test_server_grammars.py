"""Grammars of requests: off the event loop, a few at a time, and only of schemas that are not too large."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from toy_server import ToyChatCodec

from darkbloom_core.contracts import AnswerFormat, Chat, JsonText, Message, RegexText, TextPart, Tool
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.grammar import COMPILATIONS_AT_ONCE, GrammarCompiler
from darkbloom_core.server._grammars import OutputGrammars


class Watched(GrammarCompiler):
    """Knows how many compile at once, and waits until as many as may do."""

    def __init__(self, codec):
        super().__init__(codec)
        self.running, self.most, self.threads = 0, 0, set()
        self._together = threading.Barrier(COMPILATIONS_AT_ONCE)

    def compile(self, grammar):
        self.running += 1
        self.most = max(self.most, self.running)
        self.threads.add(threading.current_thread())
        self._together.wait(10)
        self.running -= 1
        return super().compile(grammar)


def chat(**fields):
    return Chat(messages=(Message(role="user", content=(TextPart("A"),)),), **fields)


def test_a_few_compile_at_once_and_none_on_the_event_loop() -> None:
    codec = ToyChatCodec()
    slot = SimpleNamespace(codec=codec, grammars=Watched(codec))
    asked = chat(answer=AnswerFormat(text=RegexText("A+", "response_format")))

    async def many():
        grammars = OutputGrammars()
        return await asyncio.gather(*(grammars.compiled(asked, slot) for _ in range(6)))

    assert None not in asyncio.run(many())
    assert slot.grammars.most == COMPILATIONS_AT_ONCE
    assert threading.current_thread() not in slot.grammars.threads


class Asked(ToyChatCodec):
    def grammar(self, chat):
        pytest.fail("the family was asked about a schema without bounds")


def test_a_family_is_not_asked_about_a_schema_that_is_too_large() -> None:
    large = {"type": "object", "properties": {f"k{n}": {} for n in range(1001)}}
    tool = Tool(name="f", parameters=large, strict=True, origin="tools[0].x")
    answer = AnswerFormat(text=JsonText(large, "x"))
    for asked in (
        chat(answer=answer),
        chat(tools=(tool,)),
        chat(tools=(Tool(name="f", parameters=large),), parallel_tool_calls=False),
    ):
        slot = SimpleNamespace(codec=Asked(), grammars=None)
        with pytest.raises(InvalidRequest, match="properties has more than"):
            asyncio.run(OutputGrammars().compiled(asked, slot))
