"""The outer layers: every request gets an id and a bounded body, and every failure an answer.

Whatever is raised below, the client gets one well-formed error (or, once the answer has
begun, a broken connection), and telemetry exactly one ``RequestRefused`` unless the
request had been accepted.
"""

from __future__ import annotations

import asyncio
import json
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from darkbloom_core.contracts import Emitter, RequestRefused
from darkbloom_core.errors import BodyTooLarge, DarkbloomError
from darkbloom_core.server._context import RequestContext, request_context
from darkbloom_core.server._errors import error_answer

logger = logging.getLogger("darkbloom.server")


class RequestIds:
    """The outermost ASGI middleware: a request's context, and its id in every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(Headers(scope=scope))
        context.store(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = context.request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Edge:
    """ASGI middleware around everything that may fail."""

    def __init__(self, app: ASGIApp, *, emitter: Emitter, body_bytes_limit: int) -> None:
        self._app = app
        self._emitter = emitter
        self._body_bytes_limit = body_bytes_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = request_context(scope)
        body = _BoundedBody(receive, Headers(scope=scope), self._body_bytes_limit)
        answer_began = False

        async def watched_send(message: Message) -> None:
            nonlocal answer_began
            answer_began = True
            await send(message)

        try:
            await self._app(scope, body.receive, watched_send)
        except (Exception, asyncio.CancelledError) as error:
            answer = error_answer(error)
            if answer.code == DarkbloomError.code:
                logger.exception("request %s failed", context.request_id)
            if not context.accepted:
                self._emitter.emit(
                    RequestRefused(
                        status=answer.status, error_code=answer.code, media_kind=context.media_kind
                    )
                )
            if answer_began:
                raise
            content, fields = context.error_body(answer), dict(answer.headers)
            await send_json(send, content, status=answer.status, headers=fields)


async def send_json(
    send: Send, content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """Send a whole JSON answer."""
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class _BoundedBody:
    """Counts a body as it arrives and refuses the byte that is one too many."""

    def __init__(self, receive: Receive, headers: Headers, bytes_limit: int) -> None:
        self._receive = receive
        self._bytes_limit = bytes_limit
        self._bytes_seen = 0
        length = headers.get("content-length", "0")
        self._bytes_announced = int(length) if length.isdecimal() else 0

    async def receive(self) -> Message:
        if self._bytes_announced > self._bytes_limit:
            raise self._too_large()
        message = await self._receive()
        if message["type"] == "http.request":
            self._bytes_seen += len(message.get("body", b""))
            if self._bytes_seen > self._bytes_limit:
                raise self._too_large()
        return message

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than the limit of {self._bytes_limit} bytes")
