"""Videos: which frames are taken, by seeking, and what is refused."""

import struct
import sys
from contextlib import suppress

import numpy as np
import pytest
from media_files import number_of, numbered_frames, picture_file, video_file
from PIL import Image

from darkbloom_core.errors import InvalidRequest, RequestCancelled
from darkbloom_core.media import MediaSource
from darkbloom_core.media import _video as video
from darkbloom_core.media._headers import mp4_entries, webm_described_bytes
from darkbloom_core.media._video import decode_frames, inspect_video
from darkbloom_core.settings import MediaSettings

SOURCE = MediaSource("video", "", "messages[0]")


def never():
    """Nobody asks for an end."""


def inspect(data, **limits):
    return inspect_video(SOURCE, data, MediaSettings(**limits), never)


def take(data, most, check=never):
    facts = inspect(data)
    stamps = facts.sampled(most)
    frames = list(decode_frames(SOURCE, data, facts, stamps, check))
    return [number_of(frame) for frame in frames], [round(facts.seconds(stamp), 3) for stamp in stamps]


CASES = [
    ("mp4", "libx264"),
    ("mov", "libx264"),
    ("webm", "libvpx-vp9"),
    ("webm", "libvpx"),
    ("mp4", "libx265"),
]


@pytest.mark.parametrize(("container", "codec"), CASES)
@pytest.mark.parametrize("gop", [1, 7, 200])
def test_frames_are_taken_uniformly_with_their_times(container, codec, gop):
    data = video_file(numbered_frames(40), container=container, codec=codec, gop=gop)
    assert take(data, 8) == ([0, 5, 10, 15, 20, 25, 30, 35], [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5])
    assert take(data, 3) == ([0, 13, 26], [0, 1.3, 2.6])


@pytest.mark.parametrize("codec", ["mjpeg", "prores_ks", "libsvtav1"])
def test_every_codec_on_the_list_is_read(codec):
    data = video_file(numbered_frames(6), container="mov" if codec != "libsvtav1" else "mp4", codec=codec)
    assert take(data, 3) == ([0, 2, 4], [0, 0.2, 0.4])


def test_a_short_video_gives_all_its_frames():
    data = video_file(numbered_frames(5), rate=2)
    assert take(data, 32) == ([0, 1, 2, 3, 4], [0, 0.5, 1, 1.5, 2])
    assert take(video_file(numbered_frames(1)), 32) == ([0], [0])


def test_it_seeks_instead_of_decoding_everything():
    data, decoded = video_file(numbered_frames(40), gop=4), []
    take(data, 4, check=lambda: decoded.append(1))
    assert len(decoded) <= 4 * 4
    long, decoded = video_file(numbered_frames(40), gop=500), []
    take(long, 4, check=lambda: decoded.append(1))
    assert len(decoded) <= 40  # one run through a single group, never from its start again


def test_a_turned_video_comes_upright():
    frame = np.zeros((48, 64, 3), np.uint8)
    frame[:, :32] = 220  # bright on the left
    for rotation, bright in ((0, "left"), (90, None), (180, "right"), (-90, None)):
        data = video_file([frame] * 3, rotation=rotation)
        (found,) = decode_frames(SOURCE, data, inspect(data), inspect(data).sampled(1), never)
        sides = {
            "left": found[:, : found.shape[1] // 2], "right": found[:, found.shape[1] // 2 :],
            "top": found[: found.shape[0] // 2], "bottom": found[found.shape[0] // 2 :],
        }  # fmt: skip
        brightest = max(sides, key=lambda side: sides[side].mean())
        expected = {0: "left", 180: "right", 90: "bottom", -90: "top"}[rotation]
        assert brightest == (bright or expected), rotation
        assert found.shape[:2] == ((48, 64) if bright else (64, 48))


def test_the_caps_hold_to_the_frame():
    data = video_file(numbered_frames(21), rate=10)  # two seconds from the first frame to the last
    assert inspect(data, video_seconds=2.1).pixels == 48 * 64
    with pytest.raises(InvalidRequest, match=r"at most 1\.9 are allowed"):
        inspect(data, video_seconds=1.9)
    assert inspect(data, image_pixels=48 * 64)
    with pytest.raises(InvalidRequest, match="64 x 48 pixels, and at most 3071"):
        inspect(data, image_pixels=48 * 64 - 1)


def test_too_many_frames_for_its_length_are_refused(monkeypatch):
    data = video_file(numbered_frames(30), rate=30)
    monkeypatch.setattr(video, "MOST_PACKETS_PER_SECOND", 29)
    with pytest.raises(InvalidRequest, match="more than 29 frames"):
        inspect(data, video_seconds=1)


def with_duration(data, box, seconds):
    """``data`` with another duration in its movie header (``mvhd``) or its track's media header (``mdhd``)."""
    at = data.index(box) + 4
    assert data[at] == 0  # version 0: four-byte times
    (scale,) = struct.unpack(">I", data[at + 12 : at + 16])
    return data[: at + 16] + struct.pack(">I", int(seconds * scale)) + data[at + 20 :]


def with_long_frames(data, factor):
    """``data`` with every frame shown ``factor`` times as long, which its headers do not know."""
    at = data.index(b"stts") + 4
    (entries,) = struct.unpack(">I", data[at + 4 : at + 8])
    out = bytearray(data)
    for entry in range(entries):
        place = at + 12 + 8 * entry
        (ticks,) = struct.unpack(">I", data[place : place + 4])
        out[place : place + 4] = struct.pack(">I", ticks * factor)
    return bytes(out).replace(b"edts", b"free")  # or players would cut off what is longer


def test_a_lie_about_the_duration_is_found_in_either_direction():
    data = video_file(numbered_frames(20), rate=10, options={"bf": "0"})
    for box, seconds in ((b"mvhd", 100_000), (b"mdhd", 100_000), (b"mvhd", 0.2), (b"mdhd", 0.2)):
        with pytest.raises(InvalidRequest, match="lies"):
            inspect(with_duration(data, box, seconds))
    with pytest.raises(InvalidRequest, match=r"lasts|lies"):
        inspect(with_long_frames(data, 10_000))
    assert len(inspect(with_duration(data, b"mvhd", 2.5)).stamps) == 20


def with_claims(data, samples):
    """``data``, whose tables claim so many frames of one byte each, all in its one chunk, in no more room."""
    out = bytearray(data)
    for name, place, numbers in (
        (b"stsz", 8, (1, samples)),
        (b"stts", 12, (samples, 1)),
        (b"stsc", 16, (samples,)),
    ):
        at = data.index(name) + place
        out[at : at + 4 * len(numbers)] = struct.pack(f">{len(numbers)}I", *numbers)
    return bytes(out).replace(b"edts", b"free")


def test_tables_may_claim_so_many_entries_and_no_more(monkeypatch):
    data = video_file(numbered_frames(20), options={"bf": "0"})
    assert mp4_entries(data, 100) == 21  # the frames, and their one chunk
    assert mp4_entries(with_claims(data, 1000), 100) == 1001
    edits = data.index(b"elst") + 8
    assert mp4_entries(data[:edits] + struct.pack(">I", 3) + data[edits + 4 :], 100) == 63
    assert mp4_entries(data.replace(b"udta", b"cmov"), 100) is None
    many = b"stsc" + b"\xff" * 8
    assert mp4_entries(struct.pack(">I", 8 + 12 * 500_000) + b"moov" + many * 500_000, 100) == 101
    monkeypatch.setattr(video, "MOST_ENTRIES", 21)
    assert len(inspect(data).stamps) == 20
    monkeypatch.setattr(video, "MOST_ENTRIES", 20)
    for refused in (data, data.replace(b"udta", b"cmov")):
        with pytest.raises(InvalidRequest, match="claim more than 20 entries"):
            inspect(refused)


def with_tags(data, count):
    """``data``, a WebM, with so many empty tags at its beginning; its segment's size is open, as of a live one."""
    at = data.index(b"\x18\x53\x80\x67") + 4
    tags = b"\x73\x73\x80" * count
    head = b"\x12\x54\xc3\x67" + struct.pack(">Q", len(tags) | 1 << 56)
    return data[:at] + b"\x01" + b"\xff" * 7 + head + tags + data[at + 8 :]


def test_a_webm_may_hold_so_much_beside_its_frames_and_no_more(monkeypatch):
    data = video_file(numbered_frames(20), container="webm", codec="libvpx-vp9")
    own = webm_described_bytes(data)
    assert 0 < own < len(data)
    assert webm_described_bytes(with_tags(data, 1000)) == own + 12 + 3000
    assert webm_described_bytes(data + b"\0" * 100) == own + 100
    assert webm_described_bytes(b"\xa3\x90" + bytes(16)) == 2
    assert webm_described_bytes(b"\xa3\x90" + bytes(15)) == 17  # a frame that does not end
    monkeypatch.setattr(video, "DESCRIBED_BYTES", own + 312)
    assert len(inspect(with_tags(data, 100)).stamps) == 20
    with pytest.raises(InvalidRequest, match=f"more than {own + 312} bytes that are not frames"):
        inspect(with_tags(data, 101))


def test_truncated_and_broken_videos_are_refused_and_nothing_else_happens():
    rng = np.random.default_rng(3)
    for container, codec in CASES:
        data = video_file(numbered_frames(12), container=container, codec=codec)
        for length in (0, 4, 8, 40, 100):
            with pytest.raises(InvalidRequest):
                take(data[:length], 4)
        for number in range(25):
            broken = bytearray(data)
            for place in rng.integers(12, len(data), 1 + number):
                broken[place] = rng.integers(0, 256)
            with suppress(InvalidRequest):  # one or the other: frames that decode, or a refusal
                assert len(take(bytes(broken), 4)[0]) >= 1
        with pytest.raises(InvalidRequest):
            take(data[:16] + rng.bytes(3000), 4)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"#EXTM3U\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        b"RIFF\0\0\0\0AVI LIST", b"\0" * 1000, picture_file(Image.new("RGB", (8, 8))),
    ],
)  # fmt: skip
def test_other_files_are_refused_by_their_first_bytes(data):
    with pytest.raises(InvalidRequest, match="not an MP4, MOV or WebM"):
        inspect(data)


def test_a_codec_that_is_not_on_the_list_is_refused():
    data = video_file(numbered_frames(3), container="matroska", codec="ffv1", options={"level": "3"})
    with pytest.raises(InvalidRequest, match="none of the codecs h264"):
        inspect(data)


def test_sound_alone_is_no_video():
    import io

    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        for packet in (*stream.encode(frame), *stream.encode()):
            file.mux(packet)
    with pytest.raises(InvalidRequest, match="no picture track"):
        inspect(out.getvalue())


def test_work_that_is_not_wanted_any_more_stops_between_frames():
    def stop():
        raise RequestCancelled("gone")

    with pytest.raises(RequestCancelled):
        take(video_file(numbered_frames(8)), 8, check=stop)


def test_without_its_library_a_video_is_refused_by_name(monkeypatch):
    data = video_file(numbered_frames(2))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest, match="need the package av"):
        inspect(data)
