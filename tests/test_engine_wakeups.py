"""Nobody waits for news that has come: thousands of quick requests, from threads and event loops.

What is looked for is a moment, so threads take turns as often as they can. A wake-up that is
lost shows as a reader, or an engine, that waits for ever, if there is no other traffic that
wakes it by chance: so there are few readers at a time, some that let their buffers run full,
and the engine's deadline is off.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable

import pytest
from soak import length
from toy_engine import is_empty, request, start, wait_for
from toy_family import ToyModel, full, tokens_of

from darkbloom_core.engine import Engine, OutputEnd, OutputEvent, OutputStream

MOST_TOKENS = 6
BUFFER = 2
LONGEST_PAUSE_SECONDS = 0.001


class Asking:
    """Requests with an answer that is known, and the check of what came of them; used by many threads."""

    def __init__(self, engine: Engine, model: ToyModel) -> None:
        self._engine = engine
        self._answers = [model.greedy([token], MOST_TOKENS) for token in range(8)]
        self._numbers = itertools.count()
        self.ends: list[str] = []

    def ask(self, chance: random.Random) -> tuple[OutputStream, list[int]]:
        """A stream, and the tokens that it brings unless it is cancelled."""
        token, most = chance.randrange(8), chance.randint(1, MOST_TOKENS)
        stream = self._engine.submit(request(str(next(self._numbers)), [token], most))
        return stream, self._answers[token][:most]

    def check(self, events: list[OutputEvent], tokens: list[int]) -> None:
        (end,) = [event for event in events if isinstance(event, OutputEnd)]
        self.ends.append(end.reason)
        assert end.error is None
        read = tokens_of(events)
        assert read == (tokens[: len(read)] if end.reason == "cancelled" else tokens)

    def thread(self, seed: int, count: int) -> None:
        """One after the other, read by this thread."""
        chance = random.Random(seed)
        for _ in range(count):
            stream, tokens = self.ask(chance)
            if chance.random() < 0.3:
                time.sleep(chance.random() * LONGEST_PAUSE_SECONDS)
            lets_it_fill, leaves, looks = (chance.random() < share for share in (0.3, 0.2, 0.5))
            while lets_it_fill and not (stream.is_full or stream.ended):
                time.sleep(0)
            if leaves:
                stream.cancel()
            while leaves and looks and not stream.ended:  # nothing but the cancellation can wake the engine
                time.sleep(0)
            self.check(list(stream), tokens)

    def event_loop(self, seed: int, count: int) -> None:
        """One after the other, read in an event loop of this thread."""

        async def client() -> None:
            chance = random.Random(seed)
            for _ in range(count):
                stream, tokens = self.ask(chance)
                if chance.random() < 0.3:
                    await asyncio.sleep(chance.random() * LONGEST_PAUSE_SECONDS)
                lets_it_fill, leaves, looks = (chance.random() < share for share in (0.3, 0.2, 0.5))
                while lets_it_fill and not (stream.is_full or stream.ended):
                    await asyncio.sleep(0)
                if leaves:
                    stream.cancel()
                while leaves and looks and not stream.ended:
                    await asyncio.sleep(0)
                self.check([event async for event in stream], tokens)

        asyncio.run(client())


@pytest.fixture
def hasty():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def all_at_once(jobs: list[Callable[[], None]], seconds: float) -> None:
    """Run each in a thread of its own; none may be left after ``seconds``, and none may raise."""
    faults: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert faults == []
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"


def play(threads: int, loops: int, count: int, seconds: float, **options) -> None:
    """``count`` requests of each of so many threads and event loops."""
    model = ToyModel([full()])
    engine = start(model, max_rows=4, progress_seconds=1e9, event_buffer=BUFFER, **options)
    try:
        asking = Asking(engine, model)
        jobs = [lambda seed=seed: asking.thread(seed, count) for seed in range(threads)]
        jobs += [lambda seed=seed: asking.event_loop(~seed, count) for seed in range(loops)]
        all_at_once(jobs, seconds)
        assert len(asking.ends) == (threads + loops) * count
        assert {"length", "cancelled"} <= set(asking.ends)
        wait_for(lambda: is_empty(engine))
    finally:
        engine.close(5)


@pytest.mark.parametrize(("threads", "loops"), [(1, 0), (0, 1), (3, 3)])
def test_nobody_waits_for_ever(hasty, threads, loops):
    play(threads, loops, 300 // (threads + loops), 15, chained=False)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(("threads", "loops"), [(1, 0), (0, 1), (1, 1), (6, 6)])
def test_nobody_of_many_waits_for_ever(hasty, threads, loops, chained):
    play(threads, loops, length(10_000, 600) // (threads + loops), 280, chained=chained)
