"""Lets through who shows a key and asks no more than that key may.

Always true: without a known key only an ``OpenRoute`` answers, and nothing of a body is
read before the key was looked at. A server without keys lets everybody through but pages
that may not ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from darkbloom_core.errors import DarkbloomError, Unauthorized
from darkbloom_core.server._context import request_context
from darkbloom_core.server._errors import ErrorAnswer
from darkbloom_core.server._keys import KeyRing
from darkbloom_core.server._limits import KeyLimits
from darkbloom_core.server._pages import Pages


class OpenRoute(Route):
    """A route that answers without an API key: health, or a page that asks for the key."""


@runtime_checkable
class WritesErrors(Protocol):
    """An endpoint of another dialect. Its errors have its shape, those before it is called too."""

    def error_body(self, answer: ErrorAnswer) -> Mapping[str, Any]: ...


class Gate:
    """ASGI middleware around ``routes``."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        keys: KeyRing,
        limits: KeyLimits,
        pages: Pages,
    ) -> None:
        self._app = app
        self._routes = routes
        self._keys = keys
        self._limits = limits
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            counted = self._let_in(scope)
        except DarkbloomError:
            _write_errors_as(self._route(scope), scope)
            raise
        if counted is None:
            await self._app(scope, receive, send)
        else:
            await self._count(counted, scope, receive, send)

    async def _count(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that counts for ``name`` until its answer is complete: then the client may ask again."""
        counts = True

        def leave() -> None:
            nonlocal counts
            if counts:
                counts = False
                self._limits.leave(name)

        async def send_and_leave(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                leave()
            await send(message)

        try:
            await self._app(scope, receive, send_and_leave)
        finally:
            leave()

    def _let_in(self, scope: Scope) -> str | None:
        """The name of the key that the request counts for, if it does. Raises the refusal."""
        headers, context = Headers(scope=scope), request_context(scope)
        if not self._keys:
            self._pages.check(scope["method"], headers)
            return None
        try:
            context.key_name = self._keys.holder(headers)
        except Unauthorized:
            if not isinstance(self._route(scope), OpenRoute):
                raise
            context.anonymous = True
            return None
        if not _has_body(headers):
            return None
        self._limits.enter(context.key_name)
        return context.key_name

    def _route(self, scope: Scope) -> BaseRoute | None:
        """The route that would answer: the first that fits, as the router takes it."""
        return next((each for each in self._routes if each.matches(scope)[0] is Match.FULL), None)


def _has_body(headers: Headers) -> bool:
    """Whether it may ask for an answer, and so counts: one without a body can only look or cancel."""
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def _write_errors_as(route: BaseRoute | None, scope: Scope) -> None:
    endpoint = getattr(route, "endpoint", None)
    if isinstance(endpoint, WritesErrors):
        request_context(scope).error_body = endpoint.error_body
