"""The one place where an exception becomes an HTTP answer: status, headers and a body that names the cause.

An error's body never holds what the client sent, is never long, and says nothing about an
error that nobody foresaw except that it was logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from darkbloom_core.errors import (
    BodyTooLarge,
    ConcurrencyLimitExceeded,
    DarkbloomError,
    Draining,
    InvalidRequest,
    MethodNotAllowed,
    NotOffered,
    OriginNotAllowed,
    QueueFull,
    RateLimitExceeded,
    RequestCancelled,
    RequestError,
    RouteNotFound,
    SetupError,
    Unauthorized,
    Unavailable,
)

MESSAGE_CHARACTERS = 2000

_TYPES: tuple[tuple[type[DarkbloomError], str], ...] = (
    (Unauthorized, "authentication_error"),
    (OriginNotAllowed, "permission_error"),
    (QueueFull, "rate_limit_error"),
    (RateLimitExceeded, "rate_limit_error"),
    (ConcurrencyLimitExceeded, "rate_limit_error"),
    (RequestError, "invalid_request_error"),
    (Unavailable, "service_unavailable_error"),
    (DarkbloomError, "server_error"),
)
"""The first class that fits gives the ``type`` of the body."""

_HTTP_ERRORS: Mapping[int, type[RequestError]] = {
    401: Unauthorized,
    404: RouteNotFound,
    405: MethodNotAllowed,
    413: BodyTooLarge,
}
"""What Starlette and plugin routes raise by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """An error as a dialect writes it down; ``code`` is what telemetry counts."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The body in the shape of OpenAI's API."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def error_answer(error: BaseException) -> ErrorAnswer:
    """What to answer if handling a request raised ``error``."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers.update(error.headers or {})
        if error.status_code not in _HTTP_ERRORS:
            return _plain_http_error(error, headers)
        error = _HTTP_ERRORS[error.status_code](error.detail)
    if isinstance(error, asyncio.CancelledError):  # of what still runs when the time for stopping is over
        error = Draining("the server is shutting down", retry_after_seconds=5)
    if isinstance(error, ClientDisconnect):
        error = RequestCancelled("the client has gone before its body had come")
    if not isinstance(error, DarkbloomError) or isinstance(error, SetupError):
        error = DarkbloomError("an internal error occurred; the server's log says more")
    if isinstance(error, Unavailable):
        headers["retry-after"] = str(error.retry_after_seconds)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, NotOffered):
        headers["x-should-retry"] = "false"  # the usual clients repeat whatever has a status from 500 on
    return ErrorAnswer(
        status=error.status,
        message=_bounded(error.message),
        type=next(name for kind, name in _TYPES if isinstance(error, kind)),
        code=error.code,
        param=error.param if isinstance(error, RequestError) else None,
        headers=headers,
    )


def _plain_http_error(error: HTTPException, headers: Mapping[str, str]) -> ErrorAnswer:
    fault_of_client = 400 <= error.status_code < 500
    return ErrorAnswer(
        status=error.status_code,
        message=_bounded(error.detail),
        type=RequestError.code if fault_of_client else "server_error",
        code=InvalidRequest.code if fault_of_client else DarkbloomError.code,
        headers=headers,
    )


def _bounded(message: str) -> str:
    if len(message) <= MESSAGE_CHARACTERS:
        return message
    return message[: MESSAGE_CHARACTERS - 1] + "…"
