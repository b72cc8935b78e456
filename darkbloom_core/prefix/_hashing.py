"""Names of blocks: a chain of SHA-256 over all that decides the bits of a block's KV. Pure.

Always true: two blocks with the same name hold the same bits. A name covers the numerics id
and the scope's salt (both in the root of the chain), every token up to the block's end, the
pictures behind its soft tokens, and how prefill cut the chunks that computed it. Every field
of what is hashed has its length before it, so no two inputs share an encoding. The format,
with test vectors, is in docs/prefix.md.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from darkbloom_core.contracts import LayerKind

BLOCK_TOKENS = 256
"""Tokens of a block."""

DIGEST_BYTES = 32

NUMERICS_DOMAIN = b"darkbloom prefix numerics 1"
ROOT_DOMAIN = b"darkbloom prefix root 1"
BLOCK_DOMAIN = b"darkbloom prefix block 1"

NO_SALT = b""
"""The salt where nobody is told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What the bits of KV depend on besides tokens and pictures.

    ``weights`` is a digest of all weights, ``device`` the device's own name,
    ``chunk_tokens`` the prefill grid. ``layers`` brings shapes, windows and the dtypes of
    KV. ``kernels`` names each way of computing prefill that was chosen, such as
    ``{"compiled": "no"}``.
    """

    weights: bytes
    family: str
    family_version: str
    mlx_version: str
    backend: str
    device: str
    layers: tuple[LayerKind, ...]
    chunk_tokens: int
    kernels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """``length`` soft tokens from token ``start`` of the prompt, and the digest of their picture."""

    start: int
    length: int
    digest: bytes


def numerics_id(numerics: Numerics) -> bytes:
    """32 bytes that differ whenever a member of ``numerics`` does, or a member of one of its layers."""
    members = [
        numerics.weights,
        *(text.encode() for text in (numerics.family, numerics.family_version, numerics.mlx_version)),
        numerics.backend.encode(),
        numerics.device.encode(),
        struct.pack("<Q", numerics.chunk_tokens),
        joined(_layer_encoding(layer) for layer in numerics.layers),
        joined(text.encode() for pair in sorted(numerics.kernels.items()) for text in pair),
    ]
    return hashlib.sha256(joined([NUMERICS_DOMAIN, *members])).digest()


def chain_root(numerics: bytes, salt: bytes = NO_SALT) -> bytes:
    """The parent of every first block: ``numerics`` is the numerics id, ``salt`` that of the scope."""
    return hashlib.sha256(joined([ROOT_DOMAIN, numerics, salt])).digest()


def block_hashes(
    tokens: Sequence[int], cuts: Sequence[int], root: bytes, pictures: Sequence[PictureSpan] = ()
) -> tuple[bytes, ...]:
    """The name, 32 bytes, of each whole block of a prompt, the first block's first.

    ``cuts`` are the ends of the chunks in which a cold prefill runs the prompt, ascending,
    the last one the prompt's length. Raises ``ValueError`` if they are not, or if a token
    does not fit into 32 bits.
    """
    if (
        list(cuts) != sorted(set(cuts))
        or (cuts[-1] if cuts else 0) != len(tokens)
        or min(cuts, default=1) < 1
    ):
        raise ValueError(f"cuts must ascend to the prompt's {len(tokens)} tokens, not {list(cuts)[-3:]}")
    parent, names = root, []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = hashlib.sha256(block_preimage(parent, tokens, cuts, pictures, start)).digest()
        names.append(parent)
    return tuple(names)


def block_preimage(
    parent: bytes, tokens: Sequence[int], cuts: Sequence[int], pictures: Sequence[PictureSpan], start: int
) -> bytes:
    """What is hashed for the block of ``tokens`` that begins at ``start``."""
    end = start + BLOCK_TOKENS
    block = tokens[start:end]
    if min(block) < 0 or max(block) >= 2**32:
        raise ValueError(f"a token of the block at {start} does not fit into 32 bits")
    held = sorted(
        (span for span in pictures if span.start < end and start < span.start + span.length),
        key=lambda span: span.start,
    )
    # a picture's place and length say which of its soft tokens these are, also beyond the block
    spans = [struct.pack("<qQ", span.start - start, span.length) + span.digest for span in held]
    return joined(
        [
            BLOCK_DOMAIN,
            parent,
            struct.pack(f"<{len(block)}I", *block),
            joined(spans),
            b"".join(struct.pack("<q", cut - start) for cut in _cuts_around(cuts, start, end)),
        ]
    )


def joined(members: Iterable[bytes]) -> bytes:
    """Each member after its length as 8 little-endian bytes: no two lists of members come out the same."""
    return b"".join(struct.pack("<Q", len(member)) + member for member in members)


def _cuts_around(cuts: Sequence[int], start: int, end: int) -> list[int]:
    """Where the chunk of the block's first token begins, then every cut up to the first at or past its end."""
    first = bisect_right(cuts, start)
    return [cuts[first - 1] if first else 0, *cuts[first : bisect_left(cuts, end) + 1]]


def _layer_encoding(layer: LayerKind) -> bytes:
    """Name and value of every field, so that a field that is added counts by itself."""
    return joined(
        text.encode() for one in fields(layer) for text in (one.name, repr(getattr(layer, one.name)))
    )
