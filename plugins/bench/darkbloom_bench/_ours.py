"""Our side: the engine as the server has it, fed through ``submit`` and read through its streams.

An event loop in a thread of its own reads every stream, as the server's does, and a token
counts when it is read there. Where the tokens of a peer are timed, no such hop is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from darkbloom_bench._jobs import Job, Recorder, Trace
from darkbloom_bench._sides import RunError, check_complete
from darkbloom_core.contracts import Chat, ContentDelta, Delta, Prompt
from darkbloom_core.engine import (
    Engine,
    GenerationRequest,
    OutputEnd,
    OutputStream,
    PlainParser,
    SamplingParams,
)

_GREEDY = SamplingParams(temperature=0.0)


class NumberCodec:
    """A codec that writes each token as its decimal number and a space, so that every token is seen as soon as it is there."""

    control_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._bytes = [b"%d " % token for token in range(vocab_size)]

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split()))

    def encode_chat(self, chat: Chat) -> Prompt:
        raise NotImplementedError("a benchmark has no chats")

    def grammar(self, chat: Chat) -> None:
        return None

    def parser(self, chat: Chat) -> PlainParser:
        return PlainParser()


class Ours:
    """``engine`` is ready; ``close`` ends the reading thread and leaves the engine to its owner."""

    name = "darkbloom"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._reader = threading.Thread(target=self._loop.run_forever, name="bench reader", daemon=True)
        self._reader.start()

    @property
    def choices(self) -> str:
        """What the engine chose for this model on this device."""
        choices = self._engine.status().choices
        if choices is None:
            return "nothing"
        ways = ("compiled", "compiled_alone", "chained", "packed")
        on = [name.replace("_", " ") for name in ways if getattr(choices, name)]
        fixed = [] if choices.fixed_size is None else [f"steps of {choices.fixed_size} rows"]
        return ", ".join(on + fixed) or "neither compiled nor chained nor packed"

    def run(self, job: Job) -> Trace:
        recorder, wake = Recorder(job), threading.Event()
        streams: list[OutputStream] = []
        reading: list[Future[OutputEnd]] = []
        while not recorder.is_over:
            for row in recorder.take_due():
                stream = self._engine.submit(self._request(job, row))
                streams.append(stream)
                reading.append(self._start(_read(stream, row, recorder, wake)))
            while not wake.wait(1.0):
                _raise_if_broken(reading)
            wake.clear()
            _raise_if_broken(reading)
        for stream in streams if job.hold_tokens is not None else ():
            stream.cancel()
        for future in reading:
            future.result()
        while self._engine.status().running:
            time.sleep(0.001)
        check_complete(recorder)
        return recorder.trace

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._reader.join()
        self._loop.close()

    def _request(self, job: Job, row: int) -> GenerationRequest:
        arrival = job.arrivals[row]
        return GenerationRequest(
            id=f"bench-{next(self._ids)}",
            prompt=Prompt(arrival.prompt),
            parser=PlainParser(),
            max_tokens=arrival.max_tokens,
            sampling=_GREEDY,
            ignore_stop_ids=True,
        )

    def _start(self, work: Coroutine[Any, Any, OutputEnd]) -> Future[OutputEnd]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _read(stream: OutputStream, row: int, recorder: Recorder, wake: threading.Event) -> OutputEnd:
    """Read ``stream`` to its end; tokens that come after the run is over are not counted."""
    async for event in stream:
        if isinstance(event, OutputEnd):
            wake.set()
            return event
        for token in _tokens(event.deltas):
            if not recorder.is_over and recorder.token(row, token):
                wake.set()
    raise RunError("a stream ended without its last event")


def _tokens(deltas: tuple[Delta, ...]) -> list[int]:
    return [int(word) for delta in deltas if isinstance(delta, ContentDelta) for word in delta.text.split()]


def _raise_if_broken(reading: list[Future[OutputEnd]]) -> None:
    """Raise if an output ended otherwise than by its length."""
    for future in reading:
        if future.done():
            end = future.result()
            if end.error is not None:
                raise end.error
            if end.reason != "length":
                raise RunError(f"an output ended by {end.reason}")
