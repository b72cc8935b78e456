"""What both dialects do with a request for an answer: read it, generate, and send events or their fold.

Always true: a whole answer is made of the same events that a stream sends, and every error
has the dialect's own shape and the core's status.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from darkbloom_core.engine import OutputEvent
from darkbloom_core.errors import DarkbloomError
from darkbloom_core.server import (
    AnswerRequest,
    ClientWatch,
    ErrorAnswer,
    Generation,
    generation_service,
    request_context,
)

LARGE_BODY_BYTES = 64 * 1024
"""A body from this size on is read in a thread, so that it holds nobody's stream up."""

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_json = json.JSONEncoder(separators=(",", ":")).encode
"""Compact, and plain ASCII: some clients split lines at every character that Unicode calls a line end."""

Event = dict[str, Any]
"""One event of a stream; its ``type`` is also its name."""


class Answer(Protocol):
    """Cuts one output into events, and puts the same events together. Keeps the state of that output alone."""

    def opening(self) -> Sequence[Event]:
        """What comes before any output."""
        ...

    def of(self, event: OutputEvent) -> Sequence[Event]:
        """What ``event`` brings; after an ``OutputEnd`` nothing is missing."""
        ...

    def failed(self, error: DarkbloomError) -> Sequence[Event]:
        """The last events of a stream that ends early."""
        ...

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        """The body of the whole answer, from all events in order."""
        ...


class Asked(Protocol):
    """A body that was read. ``request`` is what the core is asked for."""

    @property
    def request(self) -> AnswerRequest: ...


ReadT = TypeVar("ReadT")
AskedT = TypeVar("AskedT", bound=Asked)


class AnswerEndpoint(ABC, Generic[AskedT]):
    """``POST`` for an answer, streamed or whole, as an ASGI application."""

    @abstractmethod
    def read(self, data: bytes, owner: str | None) -> AskedT:
        """What the body asks for, and ``owner`` is the name of its API key. Raises ``InvalidRequest``. Runs on any thread."""

    @abstractmethod
    def answer(self, asked: AskedT, generation: Generation) -> Answer:
        """How to write down the outputs of ``generation``."""

    def error_body(self, answer: ErrorAnswer) -> Mapping[str, Any]:
        """An error in the dialect's shape."""
        return answer.body()

    def following(
        self, asked: AskedT, generation: Generation, answer: Answer
    ) -> AbstractContextManager[None]:
        """Entered while the answer is made."""
        return nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context(scope)
        context.error_body = self.error_body
        only_post(scope)
        data = await Request(scope, receive).body()
        async with ClientWatch(receive) as client:
            asked = await read_in_time(partial(self.read, owner=context.key_name), data)
            del data  # pictures make it large, and an answer takes long
            service = generation_service(scope["app"])
            async with service.generate(asked.request, context, client) as generation:
                answer = self.answer(asked, generation)
                with self.following(asked, generation, answer):
                    if asked.request.streamed:
                        await _send_stream(send, generation, answer)
                        return
                    events = list(answer.opening())
                    async for _, event in generation:
                        events += answer.of(event)
                    body = JSONResponse(answer.whole(events))
            await body(scope, receive, send)


def only_post(scope: Scope) -> None:
    """Refuse other methods; called when the shape of errors is settled, as a route that lists its methods is not."""
    if scope["method"] != "POST":
        raise HTTPException(405, headers={"allow": "POST"})


async def read_in_time(read: Callable[[bytes], ReadT], data: bytes) -> ReadT:
    """``read(data)``, in a thread if that may take long."""
    if len(data) < LARGE_BODY_BYTES:
        return read(data)
    return await asyncio.to_thread(read, data)


async def _send_stream(send: Send, generation: Generation, answer: Answer) -> None:
    """Send events as they come. An error in the middle is told by the last ones."""
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    await _send_events(send, answer.opening())
    try:
        async for _, event in generation:
            await _send_events(send, answer.of(event))
    except DarkbloomError as error:
        await _send_events(send, answer.failed(error))
    await send({"type": "http.response.body", "body": b""})


async def _send_events(send: Send, events: Sequence[Event]) -> None:
    if events:
        await send({"type": "http.response.body", "body": encoded(events), "more_body": True})


def encoded(events: Iterable[Event]) -> bytes:
    """``events`` as server-sent events."""
    return "".join(f"event: {event['type']}\ndata: {_json(event)}\n\n" for event in events).encode()
