"""Prefix reuse: names of blocks, what to reuse, where parts are kept. Knows no array library and no engine."""

from darkbloom_core.prefix._hashing import (
    BLOCK_TOKENS,
    NO_SALT,
    Numerics,
    PictureSpan,
    block_hashes,
    chain_root,
    numerics_id,
)

__all__ = [
    "BLOCK_TOKENS",
    "NO_SALT",
    "Numerics",
    "PictureSpan",
    "block_hashes",
    "chain_root",
    "numerics_id",
]
