"""Many clients of one engine at once: they ask, read, stall, and a third of them leave at a random moment.

Every stream that is not dropped is read to its end, and must have exactly one, for a reason
that fits what was done to it. Where the text is known beforehand it must be that text.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from toy_family import text_of

from darkbloom_core.engine import Engine, GenerationRequest, OutputEnd, OutputEvent, OutputStream

CLIENTS = 24
"""More than there are rows, so that some always wait."""


@dataclass(frozen=True)
class Asked:
    """A request, the text that it must get if that is known, and whether it must end with an error."""

    request: GenerationRequest
    text: str | None = None
    fails: bool = False


@dataclass
class Found:
    """What became of the requests: reasons of the ends, and where those stood that were cancelled."""

    reasons: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    checked_texts: int = 0


class Crowd:
    """``ask`` makes the request of a number; the same number always makes the same."""

    def __init__(self, engine: Engine, ask: Callable[[random.Random, int], Asked]) -> None:
        self.found = Found()
        self._engine = engine
        self._ask = ask
        self._numbers = itertools.count()

    def play(self, count: int) -> None:
        """Ask ``count`` more requests, and return when nobody has one any more."""
        asyncio.run(self._play(count))

    async def _play(self, count: int) -> None:
        left = iter(range(count))
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(left))

    async def _client(self, left: object) -> None:
        for _ in left:
            number = next(self._numbers)
            await self._one(random.Random(number), number)

    async def _one(self, chance: random.Random, number: int) -> None:
        asked = self._ask(chance, number)
        leaves = chance.random() < 1 / 3
        how = chance.choice((self._at_once, self._soon, self._in_prefill, self._after_some, self._when_full))
        stream = self._engine.submit(asked.request)
        if not leaves:
            if chance.random() < 0.1:
                await self._until_full(stream)
            self._check([event async for event in stream], asked)
            return
        events: list[OutputEvent] = []
        reader = aiter(stream)
        await how(stream, reader, events, chance, asked.request.id)
        self.found.moments[self._moment(asked.request.id)] += 1
        stream.cancel()
        if chance.random() < 0.1:
            await reader.aclose()
            return  # dropped: nobody reads its end
        events += [event async for event in reader]
        self._check(events, asked)

    # --- when to leave ---------------------------------------------------------------

    async def _at_once(self, stream, reader, events, chance, name) -> None:
        pass

    async def _soon(self, stream, reader, events, chance, name) -> None:
        await asyncio.sleep(chance.random() * 0.05)

    async def _in_prefill(self, stream, reader, events, chance, name) -> None:
        while self._moment(name) == "queued":
            await asyncio.sleep(0.001)

    async def _after_some(self, stream, reader, events, chance, name) -> None:
        for _ in range(chance.randint(1, 10)):
            events.append(await anext(reader))
            if isinstance(events[-1], OutputEnd):
                return

    async def _when_full(self, stream, reader, events, chance, name) -> None:
        await self._until_full(stream)

    async def _until_full(self, stream: OutputStream) -> None:
        while not (stream.is_full or stream.ended):
            await asyncio.sleep(0.002)

    def _moment(self, name: str) -> str:
        live = self._engine._desk.find(name)
        if live is None:
            return "ended"
        if live.row is None:
            return "queued"
        if live.sequence.is_prefilling:
            return "prefill"
        return "paused" if live.sequence.paused else "decode"

    # --- what must have come -------------------------------------------------------------

    def _check(self, events: list[OutputEvent], asked: Asked) -> None:
        ends = [event for event in events if isinstance(event, OutputEnd)]
        assert len(ends) == 1
        assert events[-1] is ends[0]
        self.found.reasons[ends[0].reason] += 1
        if ends[0].reason == "cancelled":
            return
        assert (ends[0].reason == "error") == asked.fails, ends[0]
        if asked.text is not None and not asked.fails:
            self.found.checked_texts += 1
            assert text_of(events) == asked.text
