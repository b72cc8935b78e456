"""Reading data: URIs."""

import base64
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.errors import InvalidRequest
from darkbloom_core.media import MediaSource
from darkbloom_core.media._source import read_source

WHERE = "messages[0].content[1].image_url.url"


def read(uri, limit=1000, kind="image"):
    return read_source(MediaSource(kind, uri, WHERE), limit)


@given(
    st.binary(min_size=1, max_size=300),
    st.sampled_from(["", "image/png", "image/jpeg;charset=x", "IMAGE/PNG"]),
)
def test_every_base64_uri_gives_its_bytes(data, media_type):
    assert read(f"data:{media_type};base64,{base64.b64encode(data).decode()}") == data


@pytest.mark.parametrize("size", [98_302, 98_303, 98_304, 98_305, 300_000])
def test_base64_of_several_pieces_gives_its_bytes_and_is_padded_at_its_end_alone(size):
    data = random.Random(size).randbytes(size)
    text = base64.b64encode(data).decode()
    assert read(f"data:;base64,{text}", size) == data
    padded = base64.b64encode(data[:98_303]).decode()
    for wrong in (padded + text, text[:-1], f"{text[:65_536]}={text[65_537:]}"):
        with pytest.raises(InvalidRequest, match="not valid base64"):
            read(f"data:;base64,{wrong}", 10**6)


@given(st.binary(min_size=1, max_size=100))
def test_every_percent_encoded_uri_gives_its_bytes(data):
    assert read("data:image/gif," + "".join(f"%{byte:02x}" for byte in data)) == data


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("https://example.org/cat.png", "data: URI"),
        ("http://127.0.0.1/", "data: URI"),
        ("file:///etc/passwd", "data: URI"),
        ("ftp://x/y", "data: URI"),
        ("/etc/passwd", "data: URI"),
        ("", "data: URI"),
        ("iVBORw0KGgo=", "data: URI"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png" + "x" * 300 + ",a", "no comma"),
        ("data:text/html;base64,QUJD", "does not say that it is an image"),
        ("data:video/mp4;base64,QUJD", "does not say that it is an image"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png,", "empty"),
        ("data:image/png;base64,QUI", "base64"),
        ("data:image/png;base64,QU JD", "base64"),
        ("data:image/png;base64,QUJD\n", "base64"),
        ("data:image/png;base64,Q-_D", "base64"),
        ("data:image/png;base64,QUJDé===", "base64"),
        ("data:image/png,%4", "percent"),
        ("data:image/png,%zz", "percent"),
        ("data:image/png,é", "percent"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_field_and_the_reason(uri, reason):
    with pytest.raises(InvalidRequest) as refusal:
        read(uri)
    assert refusal.value.param == WHERE
    assert refusal.value.message.startswith(WHERE)
    assert reason in refusal.value.message


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_part_may_be_as_large_as_the_limit_and_not_one_byte_larger(size):
    fits, over = b"x" * size, b"x" * (size + 1)
    assert read(f"data:;base64,{base64.b64encode(fits).decode()}", size) == fits
    assert read("data:," + "%78" * size, size) == fits
    for uri in (f"data:;base64,{base64.b64encode(over).decode()}", "data:," + "%78" * (size + 1)):
        with pytest.raises(InvalidRequest, match=f"has {size + 1} bytes, and at most {size}"):
            read(uri, size)


def test_a_size_over_the_limit_is_seen_before_anything_is_decoded():
    uri = "data:image/png;base64," + "A" * 40_000_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="30000000 bytes"):
            read(uri, 1000)
        assert tracemalloc.get_traced_memory()[1] < 41_000_000  # the text itself is cut once
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("before", ["", "x", "xx"])
def test_percent_encoding_is_decoded_in_pieces_that_cut_no_escape_and_take_little_memory(before):
    uri, count = f"data:,{before}" + "%41" * 300_000, 300_000 + len(before)
    tracemalloc.start()
    try:
        assert read(uri, count) == before.encode() + b"A" * 300_000
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()
    for wrong in (uri + "%", uri + "%4", uri + "%zz", uri + "é"):
        with pytest.raises(InvalidRequest, match="not valid percent-encoding"):
            read(wrong, count + 2)
