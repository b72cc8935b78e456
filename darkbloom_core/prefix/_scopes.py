"""Salts of scopes: who may share blocks with whom. Pure.

Always true: two scopes share no block, since their chains have different roots; without
``secret`` a name confirms no guess of a prompt.
"""

from __future__ import annotations

import hmac

from darkbloom_core.prefix._hashing import joined

SCOPE_DOMAIN = b"darkbloom prefix scope 1"


def scope_salt(secret: bytes, scope: str | None, cache_key: str | None = None) -> bytes:
    """32 bytes for ``scope`` and, inside it, ``cache_key``: HMAC-SHA256 under ``secret``.

    None is a scope of its own, that of requests which name none; it differs from ``""``.
    ``secret`` is random, and as durable as what is named with it: that of a process for
    RAM, that of a cache directory for a disk.
    """
    members = [
        b"" if name is None else b"=" + name.encode("utf-8", "surrogatepass") for name in (scope, cache_key)
    ]
    return hmac.digest(secret, joined([SCOPE_DOMAIN, *members]), "sha256")
