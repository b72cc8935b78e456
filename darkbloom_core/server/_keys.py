"""Whose key a request shows.

Always true: a key is compared as a digest, with every known one and in constant time, so
that how long it takes tells nothing of any; no key is kept, logged or sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence

from starlette.datastructures import Headers

from darkbloom_core.errors import Unauthorized
from darkbloom_core.settings import ApiKey

HOW = "as `Authorization: Bearer KEY` or `x-api-key: KEY`"


class KeyRing:
    """The keys that are known; false if there are none, and then nobody needs one."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._digests = [(key.name, _digest(key.key)) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holder(self, headers: Headers) -> str:
        """The name of the key that ``headers`` show. Raises ``Unauthorized``."""
        shown = list(_shown(headers))
        if not shown:
            raise Unauthorized(f"this server needs an API key: send it {HOW}")
        for key in shown:
            digest = _digest(key)
            found = [name for name, known in self._digests if hmac.compare_digest(digest, known)]
            if found:
                return found[0]
        raise Unauthorized("the API key is not one of this server's")


def _shown(headers: Headers) -> Iterator[str]:
    """What the headers offer as keys, as OpenAI's and Anthropic's clients send them."""
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            yield key.strip()
    yield from headers.getlist("x-api-key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
