"""Names of blocks: a chain of SHA-256 over all that decides the bits of a block's KV. Pure.

Always true: two blocks with the same name hold the same bits. A name covers the numerics id
and the scope's salt (both in the root of the chain), every token up to the block's end, the chunk
that computes it, and the pictures in that chunk: they decide its masks, and those that touch
see each other. Every field of what is hashed has its length before it, so no two inputs share
an encoding. The format, with test vectors, is in docs/prefix.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from darkbloom_core.contracts import LayerKind

BLOCK_TOKENS = 256
"""The most tokens of a block."""

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
class Block:
    """Tokens ``start`` to ``end - 1`` of a prompt; the chunk that computes them is ``chunk_start`` to ``chunk_end - 1``."""

    start: int
    end: int
    chunk_start: int
    chunk_end: int


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


def prompt_blocks(cuts: Sequence[int]) -> tuple[Block, ...]:
    """The blocks of a prompt that a cold prefill runs in chunks that end at ``cuts``, ascending.

    Each chunk is cut into blocks from its start on; its last block may be shorter. What is left
    of the last chunk is one only if it ends where a block of text would: a longer prompt
    ends no chunk elsewhere.
    """
    blocks = []
    for first, last in pairwise([0, *cuts]):
        for start in range(first, last, BLOCK_TOKENS):
            end = min(last, start + BLOCK_TOKENS)
            if end - start == BLOCK_TOKENS or last != cuts[-1] or end % BLOCK_TOKENS == 0:
                blocks.append(Block(start, end, first, last))
    return tuple(blocks)


def block_hashes(
    tokens: Sequence[int], cuts: Sequence[int], root: bytes, pictures: Sequence[PictureSpan] = ()
) -> tuple[bytes, ...]:
    """The name, 32 bytes, of each of a prompt's ``prompt_blocks``.

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
    for block in prompt_blocks(cuts):
        parent = hashlib.sha256(block_preimage(parent, tokens, block, pictures)).digest()
        names.append(parent)
    return tuple(names)


def block_preimage(
    parent: bytes, tokens: Sequence[int], block: Block, pictures: Sequence[PictureSpan]
) -> bytes:
    """What is hashed for ``block`` of a prompt; ``pictures`` are those of the prompt, in order."""
    start, held = block.start, tokens[block.start : block.end]
    if min(held) < 0 or max(held) >= 2**32:
        raise ValueError(f"a token of the block at {start} does not fit into 32 bits")
    spans = [
        struct.pack("<qQ", span.start - start, span.length) + span.digest
        for span in pictures
        if span.start < block.chunk_end and block.chunk_start < span.start + span.length
    ]
    return joined(
        [
            BLOCK_DOMAIN,
            parent,
            struct.pack(f"<{len(held)}I", *held),
            joined(spans),
            struct.pack("<qq", block.chunk_start - start, block.chunk_end - start),
        ]
    )


def joined(members: Iterable[bytes]) -> bytes:
    """Each member after its length as 8 little-endian bytes: no two lists of members come out the same."""
    return b"".join(struct.pack("<Q", len(member)) + member for member in members)


def _layer_encoding(layer: LayerKind) -> bytes:
    """Name and value of every field, so that a field that is added counts by itself."""
    return joined(
        text.encode() for one in fields(layer) for text in (one.name, repr(getattr(layer, one.name)))
    )
