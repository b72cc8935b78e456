"""What belongs to one HTTP request from its first byte to its last: its id, its trace, its clock, its client."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from darkbloom_core.contracts import MediaKind
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.server._errors import ErrorAnswer

REQUEST_ID_CHARACTERS = 256

SCOPE_HEADER = "X-Darkbloom-Scope"
SCOPE_CHARACTERS = 256

_KEY = "darkbloom.request"
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SCOPE = re.compile(rf"[\x20-\x7e]{{1,{SCOPE_CHARACTERS}}}")
_REQUEST_ID = re.compile(rf"[\x20-\x7e]{{1,{REQUEST_ID_CHARACTERS}}}")


class RequestContext:
    """``accepted`` is set once ``RequestStarted`` was emitted: from then on the request is not refused any more.

    ``key_name`` is whose API key the request shows, None if the server needs none;
    ``anonymous`` is whether it shows none where one is needed, as open routes allow.

    ``error_body`` writes the body of an error; a route of another dialect puts its own there
    before anything can fail. ``media_kind`` says what the model is to see, once that is known.
    """

    def __init__(self, headers: Headers) -> None:
        self.request_id = _request_id(headers.get("x-request-id"))
        self.trace_parent = _trace_parent(headers.get("traceparent"))
        self.started_unix_nanoseconds = time.time_ns()
        self.started_seconds = time.monotonic()
        self.accepted = False
        self.media_kind: MediaKind | None = None
        self.key_name: str | None = None
        self.anonymous = False
        self._scopes = headers.getlist(SCOPE_HEADER)
        self.error_body: Callable[[ErrorAnswer], Mapping[str, Any]] = ErrorAnswer.body

    @property
    def scope(self) -> str | None:
        """Whom the request is for: only requests of the same scope share what was computed for their prompts.

        The header tells scopes of one API key apart; those of two keys are never the same.
        Raises ``InvalidRequest`` for a header that is there twice or is no printable ASCII.
        """
        asked = self._asked_scope()
        return asked if self.key_name is None else f"key {self.key_name}\n{asked or ''}"

    def _asked_scope(self) -> str | None:
        if not self._scopes:
            return None
        if len(self._scopes) > 1 or not _SCOPE.fullmatch(self._scopes[0]):
            raise InvalidRequest(
                f"{SCOPE_HEADER}: must be there once, with 1 to {SCOPE_CHARACTERS} characters of printable ASCII",
                param=SCOPE_HEADER,
            )
        return self._scopes[0]

    def store(self, scope: Scope) -> None:
        """Make this the context of the request that ``scope`` describes."""
        scope[_KEY] = self


def request_context(scope: Scope) -> RequestContext:
    """The context of the request that ``scope`` describes."""
    context = scope[_KEY]
    assert isinstance(context, RequestContext)
    return context


class ClientWatch:
    """Waits for the client to hang up while its request is worked on.

    Enter it when the body has been read; nothing else may read ``receive`` until it is left.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` as soon as the client hangs up; at once if it already has."""
        if self.gone:
            callback()
        else:
            self._callbacks.append(callback)

    async def __aenter__(self) -> ClientWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        for callback in self._callbacks:
            callback()


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req_{secrets.token_hex(16)}"


def _trace_parent(given: str | None) -> str | None:
    """The header if it has the form of W3C Trace Context, section 3.2; anything else could carry text."""
    return given if given is not None and _TRACE_PARENT.fullmatch(given) else None
