"""Without the key the folder says nothing of what was asked: not a token, a word, a scope, a hash, or that two are alike."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from darkbloom_core.contracts import Fetch, PartKey
from darkbloom_core.prefix import block_hashes, chain_root, scope_salt

TEXT = b"the patient's name is Ada Lovelace and her diagnosis is "
TOKENS = tuple(range(7000, 7512))
SCOPE = "tenant-hospital-42"
MODEL = "acme/medical-7b"
SALT = scope_salt(b"s" * 32, SCOPE, None)
ROOT = chain_root(b"n" * 32, SALT)
BLOCKS = block_hashes(TOKENS, [256, 512], ROOT)
PLAINTEXT = (
    TEXT * 4
    + struct.pack("<512i", *TOKENS)
    + SCOPE.encode()
    + b"".join(BLOCKS)
    + ROOT
    + SALT
    + MODEL.encode()
)

NEEDLES = {
    "text": TEXT[:16],
    "tokens": struct.pack("<4i", *TOKENS[:4]),
    "scope": SCOPE.encode(),
    "model": MODEL.encode(),
    "salt": SALT,
    "root": ROOT,
    "block": BLOCKS[0],
    "another block": BLOCKS[1],
}


def needles_in(haystack: bytes) -> set[str]:
    """Which needles are in these bytes, plainly, in hexadecimal, or by their first half."""
    lower = haystack.lower()
    return {
        name
        for name, needle in NEEDLES.items()
        for form in (needle, needle[: max(8, len(needle) // 2)])
        if form in haystack or form.hex().encode() in lower
    }


def everything_in(folder: Path) -> bytes:
    """Names, contents and links of all that is below."""
    found = b""
    for path in sorted(folder.rglob("*")):
        found += str(path.relative_to(folder)).encode() + b"\0"
        found += path.read_bytes() if path.is_file() else b""
    return found


@pytest.fixture
def filled(place, ssd):
    tier = place.open(MODEL)
    for block in BLOCKS:
        assert tier.offer(PartKey(block, "full"), memoryview(PLAINTEXT))
        assert tier.offer(PartKey(block, "window"), memoryview(PLAINTEXT))
    assert tier.settle()
    return tier


def test_nothing_of_a_prompt_is_in_the_folder_and_the_search_would_see_it(place, filled):
    keys = [PartKey(block, part) for block in BLOCKS for part in ("full", "window")]
    buffers = [memoryview(bytearray(len(PLAINTEXT))) for _ in keys]
    came = filled.fetch([Fetch(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]).result(5)
    assert all(came)
    assert needles_in(b"".join(bytes(buffer) for buffer in buffers)) == set(NEEDLES)
    place.restart()
    assert len(place.files()) == 4
    assert needles_in(everything_in(place.folder)) == set()


def test_the_key_is_not_in_the_folder(place, filled):
    place.restart()
    everything = everything_in(place.folder)
    secret = place.key_file.read_bytes().strip()
    keys = place.keys
    for value in (bytes.fromhex(secret.decode()), keys.wrap_key, keys.name_key):
        assert value not in everything
        assert value.hex().encode() not in everything


def test_names_of_the_same_prefix_differ_under_two_keys(place, ssd, filled, tmp_path):
    other = ssd.Place(tmp_path / "other")
    tier = other.open(MODEL)
    for block in BLOCKS:
        assert tier.offer(PartKey(block, "full"), memoryview(PLAINTEXT))
        assert tier.offer(PartKey(block, "window"), memoryview(PLAINTEXT))
    assert tier.settle()
    ours, theirs = ({path.name for path in each.files()} for each in (place, other))
    assert len(ours) == len(theirs) == 4
    assert not ours & theirs
    assert {path.parent.name for path in place.files()} != {path.parent.name for path in other.files()}
    other.close()


def test_the_same_prefix_in_two_scopes_has_two_names_and_is_not_found_across(place, filled):
    other = block_hashes(
        TOKENS, [256, 512], chain_root(b"n" * 32, scope_salt(b"s" * 32, "another tenant", None))
    )
    keys = [PartKey(block, "full") for block in other]
    assert filled.probe(keys) == [None, None]
    before = {path.name for path in place.files()}
    assert filled.offer(keys[0], memoryview(PLAINTEXT))
    assert filled.settle()
    assert len({path.name for path in place.files()} - before) == 1


def test_what_is_logged_names_nothing_of_a_prompt(place, filled, caplog):
    caplog.set_level("DEBUG")
    for file in place.files():
        file.write_bytes(b"damaged")
    fetch = Fetch(PartKey(BLOCKS[0], "full"), memoryview(bytearray(len(PLAINTEXT))))
    assert filled.fetch([fetch]).result(5) == (False,)
    filled._store.recount(place.clock())
    filled._store.retention.tell()
    assert caplog.records
    assert needles_in(caplog.text.encode()) <= {"model"}
