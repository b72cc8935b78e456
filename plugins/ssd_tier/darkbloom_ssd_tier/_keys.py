"""The keys of an installation, all derived from one secret of 32 bytes, and the names that they give.

Always true: without the secret no name can be computed, so nobody can test a guess of what is kept.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

SECRET_BYTES = 32
KEY_ID_BYTES = 8
FOLDER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Keys:
    """``wrap_key`` seals the data keys of files, ``name_key`` names them, ``key_id`` tells installations apart."""

    wrap_key: bytes = field(repr=False)
    name_key: bytes = field(repr=False)
    key_id: bytes

    @classmethod
    def derived(cls, secret: bytes) -> Keys:
        """From the secret. Raises ``ValueError`` unless it is 32 bytes long."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a key has {SECRET_BYTES} bytes, this one has {len(secret)}")
        return cls(
            wrap_key=_mac(secret, b"darkbloom ssd wrap 1"),
            name_key=_mac(secret, b"darkbloom ssd names 1"),
            key_id=_mac(secret, b"darkbloom ssd key id 1")[:KEY_ID_BYTES],
        )

    def part_name(self, block: bytes, part: str) -> bytes:
        """The name of a block's part, 32 bytes; ``block`` is the block's chained hash."""
        return _mac(self.name_key, b"part 1" + len(part).to_bytes(8, "little") + part.encode() + block)

    def folder_name(self, model: str) -> str:
        """The name of a model's folder."""
        return _mac(self.name_key, b"model 1" + model.encode())[:FOLDER_BYTES].hex()


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")
