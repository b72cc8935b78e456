"""The file of a part: what is read is what was written, or nothing."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path

import pytest
from darkbloom_ssd_tier._format import (
    HEADER_BYTES,
    SEGMENT_BYTES,
    TAG_BYTES,
    Damaged,
    Stopped,
    encrypt_part,
    file_bytes,
    header_of,
    plain_bytes,
    read_part,
)
from darkbloom_ssd_tier._keys import Keys
from hypothesis import given
from hypothesis import strategies as st

KEYS = Keys.derived(bytes(range(32)))
OTHER = Keys.derived(bytes(32))
NAME = KEYS.part_name(b"b" * 32, "full")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "ssd_format.md"


def made(data: bytes, keys=KEYS, name=NAME, **more) -> bytes:
    return b"".join(bytes(piece) for piece in encrypt_part(keys, name, memoryview(data), **more))


def read(file: bytes, length: int, keys=KEYS, name=NAME) -> bytes:
    buffer = bytearray(length)
    read_part(keys, name, io.BytesIO(file).readinto, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize(
    "size", [1, 255, 65_537, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES, 800_003]
)
def test_every_size_comes_back_and_has_the_length_that_is_expected(size):
    data = bytes(itertools.islice(itertools.cycle(range(251)), size))
    file = made(data)
    assert len(file) == file_bytes(size)
    assert plain_bytes(len(file)) == size
    assert read(file, size) == data


@given(st.integers(1, 3 * SEGMENT_BYTES))
def test_a_length_that_no_part_gives_is_no_file(size):
    plain = plain_bytes(size)
    assert plain is None or file_bytes(plain) == size
    assert plain_bytes(file_bytes(size)) == size


def test_the_same_part_is_never_the_same_bytes():
    one, two = made(b"same" * 100), made(b"same" * 100)
    same = [place for place, (a, b) in enumerate(zip(one, two, strict=True)) if a == b]
    assert len([place for place in same if place >= HEADER_BYTES]) < 40
    assert read(one, 400) == read(two, 400)


def test_every_flipped_byte_is_found():
    data = b"what was computed" * 3
    file = bytearray(made(data))
    for place in range(len(file)):
        file[place] ^= 1 << place % 8
        with pytest.raises(Damaged):
            read(bytes(file), len(data))
        file[place] ^= 1 << place % 8
    assert read(bytes(file), len(data)) == data


def test_every_truncation_and_what_is_appended_is_found():
    data = b"what was computed" * 3
    file = made(data)
    for length in range(len(file)):
        with pytest.raises(Damaged):
            read(file[:length], len(data))
    with pytest.raises(Damaged):
        read(file + b"\0", len(data))


def test_segments_cannot_be_left_out_swapped_or_taken_from_another_file():
    step = SEGMENT_BYTES + TAG_BYTES
    data = b"".join(bytes([number]) * SEGMENT_BYTES for number in range(3))
    file, other = made(data), made(data)
    header, first, second, third = (
        file[:HEADER_BYTES],
        *(file[HEADER_BYTES + n * step :][:step] for n in range(3)),
    )
    for forged in (
        header + second + first + third,
        header + first + third + second,
        header + first + other[HEADER_BYTES + step :][:step] + third,
        other[:HEADER_BYTES] + first + second + third,
    ):
        with pytest.raises(Damaged):
            read(forged, len(data))
    with pytest.raises(Damaged):
        read(header + first + second, 2 * SEGMENT_BYTES)


def test_a_file_is_of_one_name_and_one_key():
    file = made(b"data")
    with pytest.raises(Damaged):
        read(file, 4, name=KEYS.part_name(b"b" * 32, "window"))
    with pytest.raises(Damaged):
        read(file, 4, keys=OTHER)
    forged = bytearray(file)
    forged[24:32] = OTHER.key_id
    with pytest.raises(Damaged):
        read(bytes(forged), 4, keys=OTHER)


def test_a_reader_that_is_not_wanted_any_more_stops():
    data = bytes(4 * SEGMENT_BYTES)
    asked = itertools.count()
    with pytest.raises(Stopped):
        read_part(
            KEYS,
            NAME,
            io.BytesIO(made(data)).readinto,
            memoryview(bytearray(len(data))),
            lambda: next(asked) == 2,
        )
    assert next(asked) == 3


def test_the_header_tells_whose_file_it_is_and_nonsense_is_none():
    assert header_of(io.BytesIO(made(b"data")).readinto) == (KEYS.key_id, NAME, 4)
    with pytest.raises(Damaged):
        header_of(io.BytesIO(b"x" * 200).readinto)
    with pytest.raises(Damaged):
        header_of(io.BytesIO(b"").readinto)


def test_names_depend_on_the_key_the_part_and_every_byte_of_the_block():
    block = bytes(range(32))
    names = {
        KEYS.part_name(block, "full"), KEYS.part_name(block, "window"), KEYS.part_name(block, "state"),
        OTHER.part_name(block, "full"), KEYS.part_name(block[::-1], "full"),
    }  # fmt: skip
    assert len(names) == 5
    assert KEYS.folder_name("a") != KEYS.folder_name("b") != OTHER.folder_name("b")


def test_the_vector_of_the_format_page_holds():
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    vector = json.loads(text)
    keys = Keys.derived(bytes.fromhex(vector["secret"]))
    assert keys.key_id.hex() == vector["key_id"]
    assert keys.folder_name(vector["model"]) == vector["folder"]
    name = keys.part_name(bytes.fromhex(vector["block"]), vector["part"])
    assert name.hex() == vector["name"]
    given_random = iter([bytes.fromhex(vector["data_key"]), bytes.fromhex(vector["wrap_nonce"])])
    plain = bytes.fromhex(vector["plaintext"])
    file = made(plain, keys, name, random=lambda size: next(given_random))
    assert file.hex() == vector["file"]
    assert read(file, len(plain), keys, name) == plain
