"""Keeps pages of the web away from a server that needs no key.

A browser on this machine reaches loopback for any page that is open in it. It lets no page
read answers of another origin, but sends what the page asks; and a page may give its own
name this machine's address, and then reads the answers, too. Always true: a request for
another origin's page changes nothing here, and one under a name of the internet gets nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from darkbloom_core.errors import OriginNotAllowed

ADVICE = "name the page's origin in server.cors_origins, or use API keys"


class Pages:
    """``origins`` are those whose pages may ask; ``*`` is every one."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)
        self._hosts = frozenset(urlsplit(origin).netloc for origin in origins)

    def check(self, method: str, headers: Headers) -> None:
        """Raise ``OriginNotAllowed`` for a request that only a page could send which may not."""
        if "*" in self._origins:
            return
        host = headers.get("host", "").lower()
        if host not in self._hosts and not _is_of_this_machine(host):
            raise OriginNotAllowed(
                f"without API keys this server answers to addresses and to names of this machine only: {ADVICE}"
            )
        origin = headers.get("origin")
        if origin is None or method in ("GET", "HEAD", "OPTIONS"):
            return
        if origin not in self._origins and origin.partition("://")[2] != (host or None):
            raise OriginNotAllowed(f"pages of another origin may not ask here: {ADVICE}")


def _is_of_this_machine(host: str) -> bool:
    """Whether nobody else can own the name in ``host``: an address, or a name without a domain."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        if "." not in name or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
