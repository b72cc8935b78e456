"""The little of an HTTP client that `darkbloom chat` needs: list models, stream a chat completion.

It speaks to any server of the OpenAI kind. Whoever stops iterating a stream closes the
connection, and that cancels the answer.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from darkbloom_core.errors import SetupError

KEY_VARIABLE = "DARKBLOOM_API_KEY"

_SECONDS_WITHOUT_A_BYTE = 600.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of the answer, or of the reasoning before it."""

    kind: Literal["content", "reasoning"]
    text: str


class ChatError(Exception):
    """The server answered with an error, or broke off the stream; the message is its own."""


class ChatClient:
    """Talks to the server at ``url`` (``http://host:port``, with or without ``/v1``).

    ``key`` is the API key to show, if one is needed. Raises ``SetupError`` if ``url`` is
    none, if nothing answers there, or if the server wants another key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = _checked(url)
        self._key = key

    def models(self) -> tuple[str, ...]:
        """The names that the server serves, in its order."""
        with self._connected("GET", "/v1/models") as response:
            listed = json.loads(response.read())
        return tuple(model["id"] for model in listed["data"])

    def stream(self, model: str, messages: Sequence[Mapping[str, Any]]) -> Generator[Piece]:
        """Ask for one answer and yield it as it comes. Raises ``ChatError`` with the server's words."""
        body = {"model": model, "messages": list(messages), "stream": True}
        with self._connected("POST", "/v1/chat/completions", body) as response:
            for data in _events(response):
                if data == "[DONE]":
                    return
                yield from _pieces(json.loads(data))

    @contextmanager
    def _connected(
        self, method: str, route: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        encoded = None if body is None else json.dumps(body).encode()
        with closing(kind(self._url.netloc, timeout=_SECONDS_WITHOUT_A_BYTE)) as connection:
            try:
                connection.request(method, self._url.path + route, encoded, headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise SetupError(f"no server answers at {self._url.geturl()}: {error}") from error
            if response.status == 401:
                raise SetupError(f"{_message(401, response.read())} (set {KEY_VARIABLE} to the key)")
            if response.status != 200:
                raise ChatError(_message(response.status, response.read()))
            yield response


def _checked(url: str) -> SplitResult:
    parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SetupError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
    return parts


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event. Raises ``ChatError`` if the stream ends without ``[DONE]``."""
    try:
        for line in response:
            if line.startswith(b"data:"):
                data = line[len(b"data:") :].decode().strip()
                yield data
                if data == "[DONE]":
                    return
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"the connection broke: {error}") from error
    raise ChatError("the server ended the answer without saying that it is complete")


def _pieces(chunk: Mapping[str, Any]) -> Iterator[Piece]:
    if "error" in chunk:
        raise ChatError(str(chunk["error"].get("message", chunk["error"])))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Piece("reasoning", reasoning)
        if content := delta.get("content"):
            yield Piece("content", content)


def _message(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {status}"
