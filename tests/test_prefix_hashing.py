"""Names of blocks: the published vectors, and that nothing that differs shares an encoding or a name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darkbloom_core.contracts import LayerKind
from darkbloom_core.engine._scheduler import chunk_end
from darkbloom_core.prefix import BLOCK_TOKENS, Numerics, PictureSpan, block_hashes, chain_root, numerics_id
from darkbloom_core.prefix._hashing import block_preimage, joined, prompt_blocks

PAGE = Path(__file__).parent.parent / "docs" / "prefix.md"
LAYERS = (LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8), LayerKind(source=0, q_heads=4))
NUMERICS = Numerics(
    weights=b"w" * 32,
    family="toy",
    family_version="1.0",
    mlx_version="0.32.4",
    backend="cpu",
    device="any",
    layers=LAYERS,
    chunk_tokens=256,
    kernels={"compiled": "no", "packed": "yes"},
)


def cuts_of(length, grid=256, spans=()):
    cuts = []
    while not cuts or cuts[-1] < length:
        cuts.append(chunk_end(cuts[-1] if cuts else 0, length, grid, spans))
    return cuts


def names(tokens, *, grid=256, root=b"root", pictures=()):
    return block_hashes(tokens, cuts_of(len(tokens), grid), root, pictures)


# --- the published format ---------------------------------------------------------------


def test_the_vectors_of_the_documentation_are_met():
    found = json.loads(re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    given_numerics = dict(found["numerics"])
    wanted = given_numerics.pop("id")
    given_numerics["weights"] = bytes.fromhex(given_numerics["weights"])
    given_numerics["layers"] = tuple(LayerKind(**layer) for layer in given_numerics["layers"])
    identity = numerics_id(Numerics(**given_numerics))
    assert identity.hex() == wanted
    assert len(found["chains"]) >= 4
    for chain in found["chains"]:
        root = chain_root(identity, bytes.fromhex(chain["salt"]))
        assert root.hex() == chain["root"]
        pictures = [
            PictureSpan(one["start"], one["length"], bytes.fromhex(one["digest"]))
            for one in chain["pictures"]
        ]
        hashes = block_hashes(range(chain["first_tokens"]), chain["cuts"], root, pictures)
        assert [name.hex() for name in hashes] == chain["blocks"]


def test_the_format_is_the_one_that_the_documentation_describes():
    """Written out by hand, beside the code."""

    def field(value):
        return len(value).to_bytes(8, "little") + value

    tokens = list(range(1000, 1300))
    picture = PictureSpan(250, 10, b"d" * 32)
    parent, found = b"p" * 32, []
    for first, last, chunk, pictures in (
        (0, 244, (0, 244), b""),
        (244, 250, (0, 6), b""),
        (250, 260, (0, 10), field((0).to_bytes(8, "little") + (10).to_bytes(8, "little") + b"d" * 32)),
    ):
        by_hand = (
            b"darkbloom prefix block 1",
            parent,
            b"".join(token.to_bytes(4, "little") for token in tokens[first:last]),
            pictures,
            struct.pack("<qq", *chunk),
        )
        parent = hashlib.sha256(b"".join(field(value) for value in by_hand)).digest()
        found.append(parent)
    hashes = block_hashes(tokens, [244, 250, 260, 300], b"p" * 32, [picture])
    assert hashes == tuple(found)


# --- no two inputs share an encoding ------------------------------------------------------


def split(encoding):
    """What ``joined`` was given, read back from its output."""
    members = []
    while encoding:
        (length,) = struct.unpack("<Q", encoding[:8])
        members.append(encoding[8 : 8 + length])
        assert len(members[-1]) == length
        encoding = encoding[8 + length :]
    return members


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_joined_members_can_be_read_back(members):
    assert split(joined(members)) == members


@st.composite
def prompts(draw):
    """Tokens with pictures that do not overlap, and the grid."""
    length = draw(st.integers(256, 1200))
    seed = draw(st.integers(0, 3))
    tokens = random.Random(seed).choices(range(2**32), k=length)
    pictures, at = [], 0
    while at < length - 1 and len(pictures) < 3 and draw(st.booleans()):
        start = draw(st.integers(at, length - 1))
        at = draw(st.integers(start + 1, length))
        pictures.append(PictureSpan(start, at - start, draw(st.binary(max_size=3))))
    return tokens, tuple(pictures), draw(st.sampled_from((256, 512)))


@settings(deadline=None)
@given(prompts(), st.binary(max_size=40))
def test_a_blocks_encoding_can_be_read_back_to_all_that_went_into_it(prompt, parent):
    tokens, pictures, grid = prompt
    cuts = cuts_of(len(tokens), grid, pictures)
    for block in prompt_blocks(cuts):
        _, parent_read, packed, spans, chunk = split(block_preimage(parent, tokens, block, pictures))
        assert parent_read == parent
        length = block.end - block.start
        assert list(struct.unpack(f"<{length}I", packed)) == tokens[block.start : block.end]
        read = []
        for one in split(spans):
            offset, length = struct.unpack("<qQ", one[:16])
            read.append(PictureSpan(block.start + offset, length, one[16:]))
        inside = range(block.chunk_start, block.chunk_end)
        assert read == [span for span in pictures if span.start in inside]
        assert [block.start + one for one in struct.unpack("<qq", chunk)] == [inside.start, inside.stop]


# --- what a name covers -------------------------------------------------------------------


def test_a_prompt_that_grows_keeps_the_names_of_its_blocks():
    tokens = list(range(2000))
    assert names(tokens)[:3] == names(tokens[:900])[:3]


def test_a_token_that_changes_changes_its_block_and_all_after_it():
    tokens = list(range(1024))
    other = [*tokens[:300], 7, *tokens[301:]]
    assert names(tokens)[0] == names(other)[0]
    assert not set(names(tokens)[1:]) & set(names(other))


def test_the_same_tokens_at_another_place_have_another_name():
    assert len(set(names([5] * 2048))) == 8


def test_a_block_knows_how_its_chunks_were_cut():
    tokens = list(range(1024))
    whole, short = block_hashes(tokens, [512, 1024], b"root"), block_hashes(tokens, [500, 530, 1024], b"root")
    assert whole[0] != short[0], (
        "the chunk of 500 tokens may have other bits, though the block ends before it"
    )
    assert names(tokens[:300], grid=512)[0] != whole[0], "a last chunk of 300 tokens"
    assert names(tokens[:1000], grid=512)[:2] == whole[:2]


@pytest.mark.parametrize(
    "other",
    [
        PictureSpan(100, 100, b"another"),
        PictureSpan(101, 100, b"picture"),
        PictureSpan(100, 101, b"picture"),
    ],
)
def test_a_picture_its_place_and_its_length_change_its_block_and_all_after_it(other):
    tokens = list(range(1024))
    one = names(tokens, pictures=[PictureSpan(100, 100, b"picture")])
    assert not set(one) & set(names(tokens, pictures=[other]))
    assert not set(one) & set(names(tokens))
    assert one == names(tokens, pictures=[PictureSpan(100, 100, b"picture")])


def test_a_picture_that_comes_later_changes_nothing_before_its_chunk():
    tokens = list(range(1024))
    assert names(tokens, pictures=[PictureSpan(600, 10, b"picture")])[:2] == names(tokens)[:2]


def test_a_picture_changes_every_block_of_its_chunk():
    """Its tokens decide the chunk's masks, and those that it touches see it, also from the block before."""
    tokens, first = list(range(1024)), PictureSpan(100, 200, b"first")
    found = {
        digest: names(tokens, grid=512, pictures=[first, PictureSpan(300, 100, digest)])
        for digest in (b"one", b"other")
    }
    assert not set(found[b"one"]) & set(found[b"other"])


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(Numerics)])
def test_every_member_of_the_numerics_id_counts(name):
    changes = {
        "weights": b"v" * 32,
        "layers": LAYERS[:1],
        "chunk_tokens": 512,
        "kernels": {"compiled": "yes", "packed": "yes"},
    }
    changed = dataclasses.replace(NUMERICS, **{name: changes.get(name, "another")})
    assert numerics_id(changed) != numerics_id(NUMERICS)
    assert chain_root(numerics_id(changed)) != chain_root(numerics_id(NUMERICS))


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(LayerKind)])
def test_every_field_of_a_layer_counts(name):
    changed = dataclasses.replace(LAYERS[0], **{name: "another"})
    assert numerics_id(dataclasses.replace(NUMERICS, layers=(changed, LAYERS[1]))) != numerics_id(NUMERICS)


def test_the_order_in_which_kernels_are_listed_does_not_count():
    turned = dataclasses.replace(NUMERICS, kernels={"packed": "yes", "compiled": "no"})
    assert numerics_id(turned) == numerics_id(NUMERICS)


def test_salts_never_cross():
    """A thousand pairs of salts over prompts that are often the same: no name in common."""
    chance = random.Random(6)
    for _ in range(1000):
        one, other = chance.randbytes(chance.randint(0, 3)), chance.randbytes(chance.randint(0, 3))
        tokens = [chance.randint(0, 1)] * 512
        first, second = (set(names(tokens, root=chain_root(b"n" * 32, salt))) for salt in (one, other))
        assert bool(first & second) == (one == other)


@pytest.mark.parametrize("cuts", [[], [256], [300, 256, 512], [256, 256, 512], [0, 512], [600]])
def test_cuts_that_are_not_those_of_the_prompt_are_refused(cuts):
    with pytest.raises(ValueError, match="512 tokens"):
        block_hashes(range(512), cuts, b"root")


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_none_is_refused(token):
    with pytest.raises(ValueError, match="32 bits"):
        names([token] * BLOCK_TOKENS)


def test_a_prompt_without_a_whole_block_has_no_names():
    assert names([1] * 255) == block_hashes([], [], b"root") == ()
