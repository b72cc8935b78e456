"""Preparing a request's media: what is reserved and when it is given back, caps over a whole request, time."""

import os
import sys
import threading

import numpy as np
import pytest
from media_files import (
    CellSeam,
    data_uri,
    flat_png,
    large_frame_video,
    numbered_frames,
    picture_file,
    video_file,
)
from peaks import printed_numbers
from PIL import Image

from darkbloom_core.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
)
from darkbloom_core.media import MediaSource, MediaWorkers
from darkbloom_core.memory import Ledger
from darkbloom_core.settings import MediaSettings

RED = data_uri(picture_file(Image.new("RGB", (32, 48), (255, 0, 0))), "image/png")
CLIP = data_uri(video_file(numbered_frames(6, 32, 48), rate=2), "video/mp4")
CONTEXT = 100_000


def image(uri=RED, number=0):
    return MediaSource("image", uri, f"part{number}")


def clip(uri=CLIP, number=0):
    return MediaSource("video", uri, f"part{number}")


class HeldSeam(CellSeam):
    """Waits inside ``prepare`` until it is let go; the pictures before the ``after``-th pass."""

    def __init__(self, after=0):
        self.entered, self.go_on, self.after = threading.Event(), threading.Event(), after

    def prepare(self, pixels, *, video):
        self.after -= 1
        if self.after < 0:
            self.entered.set()
            assert self.go_on.wait(20)
        return super().prepare(pixels, video=video)


@pytest.fixture
def workers():
    made = []

    def make(ledger=None, **limits):
        made.append(MediaWorkers(MediaSettings(**limits), ledger or Ledger()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def prepare(workers, *sources, seam=None):
    return workers.begin(sources, seam or CellSeam(), CONTEXT).future.result(20)


def kinds(ledger):
    return {
        key.removeprefix("media ").lstrip("0123456789"): one.kind
        for key, one in ledger.reservations().items()
    }


def test_parts_and_pictures_come_in_the_order_of_the_sources(workers):
    prepared = prepare(workers(), image(), clip(), image(data_uri(flat_png(64, 32), "image/png")))
    assert [part.kind for part in prepared.parts] == ["image", "video", "image"]
    assert [part.soft_tokens for part in prepared.parts] == [(6,), (6,) * 6, (8,)]
    assert prepared.parts[1].seconds == (0, 0.5, 1, 1.5, 2, 2.5)
    assert len(prepared.pictures) == 8
    assert (prepared.pictures[0].arrays["pixels"] == (255, 0, 0)).all()
    assert prepared.pictures[7].arrays["pixels"].max() == 0


def test_the_model_is_shown_no_more_frames_than_it_is_made_for(workers):
    seam = CellSeam()
    seam.most_frames = 3
    assert len(prepare(workers(), clip(), seam=seam).pictures) == 3
    assert len(prepare(workers(sampled_frames=2), clip(), seam=seam).pictures) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priorities of their own")
def test_the_threads_that_decode_yield_to_the_model(workers):
    seen = []

    class Priority(CellSeam):
        def prepare(self, pixels, *, video):
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().prepare(pixels, video=video)

    prepare(workers(), image(), seam=Priority())
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert (own, seen) == (0, [10])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be kept off cores")
def test_where_there_are_few_cores_one_request_at_a_time_is_read(workers):
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(all_cores)[:2]))  # of this thread alone
    try:
        assert (workers().count, workers(workers=5).count) == (1, 5)
    finally:
        os.sched_setaffinity(0, all_cores)


def test_what_work_and_result_take_is_reserved_and_given_back_once(workers):
    ledger, seam = Ledger(), HeldSeam()
    seam.soft_token_bytes *= 2  # a result may be smaller than was thought
    job = workers(ledger).begin([image()], seam, CONTEXT)
    assert seam.entered.wait(20)
    assert kinds(ledger) == {"": "media", " prepared": "media"}
    seam.go_on.set()
    prepared = job.future.result(20)
    assert kinds(ledger) == {" prepared": "media"}
    (held,) = ledger.reservations().values()
    assert held.size_bytes == prepared.pictures[0].arrays["pixels"].nbytes
    prepared.release()
    prepared.release()
    assert not ledger.reservations()


def test_a_request_that_is_refused_leaves_nothing_reserved(workers):
    ledger = Ledger()
    bad = data_uri(picture_file(Image.effect_noise((64, 64), 90))[:900], "image/png")
    for sources in ([image(), image(bad, 1)], [image("http://x/")], [image(data_uri(b"x", "image/png"))]):
        with pytest.raises(InvalidRequest) as refusal:
            prepare(workers(ledger), *sources)
        assert refusal.value.param == sources[-1].where
        assert not ledger.reservations()


def test_without_memory_it_is_refused_for_now(workers):
    ledger = Ledger(headroom=lambda pool: 2_000_000)
    with pytest.raises(CapacityExhausted, match="not free now"):
        prepare(workers(ledger), image())
    assert not ledger.reservations()


def test_a_short_clip_reserves_little(workers):
    """Two seconds of 320 x 240: the reservation follows the file, not the largest file that would be allowed."""
    ledger, seam = Ledger(), HeldSeam()
    frames = [np.full((240, 320, 3), 4 * number, np.uint8) for number in range(60)]
    job = workers(ledger).begin([clip(data_uri(video_file(frames, rate=30), "video/mp4"))], seam, CONTEXT)
    assert seam.entered.wait(20)
    assert sum(one.size_bytes for one in ledger.reservations().values()) < 100_000_000
    seam.go_on.set()
    job.future.result(20).release()


def test_abandoned_work_gives_back_when_it_unwinds_and_not_before(workers):
    ledger, seam = Ledger(), HeldSeam(after=2)
    job = workers(ledger).begin([clip()], seam, CONTEXT)
    assert seam.entered.wait(20)
    job.abandon()
    assert len(ledger.reservations()) == 2  # its memory is still in use
    seam.go_on.set()
    with pytest.raises(RequestCancelled):
        job.future.result(20)
    assert not ledger.reservations()


def test_a_result_that_nobody_waits_for_any_more_is_given_back(workers):
    ledger, seam = Ledger(), HeldSeam()
    job = workers(ledger).begin([image()], seam, CONTEXT)
    assert seam.entered.wait(20)
    job.abandon()
    seam.go_on.set()
    job.future.exception(20)
    assert not ledger.reservations()
    done = workers(ledger).begin([image()], CellSeam(), CONTEXT)
    done.future.result(20)
    done.abandon()
    assert not ledger.reservations()


def test_work_that_has_not_begun_is_not_begun_any_more(workers):
    busy, seam = workers(workers=1), HeldSeam()
    first = busy.begin([image()], seam, CONTEXT)
    assert seam.entered.wait(20)
    second = busy.begin([image("http://never.read/")], seam, CONTEXT)
    second.abandon()
    assert second.future.cancelled()
    seam.go_on.set()
    first.future.result(20)


def test_only_so_much_work_may_wait(workers):
    busy, seam = workers(workers=1, waiting_limit=1), HeldSeam()
    jobs = [busy.begin([image()], seam, CONTEXT) for _ in range(2)]
    with pytest.raises(QueueFull):
        busy.begin([image()], seam, CONTEXT)
    seam.go_on.set()
    for job in jobs:
        job.future.result(20)
    busy.begin([image()], CellSeam(), CONTEXT).future.result(20)


def test_work_that_takes_too_long_ends(workers):
    seam = HeldSeam(after=1)
    job = workers(decode_seconds=0.2).begin([clip()], seam, CONTEXT)
    assert seam.entered.wait(20)
    assert not job.is_overdue
    threading.Event().wait(0.3)
    seam.go_on.set()
    with pytest.raises(InvalidRequest, match=r"longer than 0\.2 seconds"):
        job.future.result(20)


def test_whoever_waits_is_told_when_to_give_up(workers, monkeypatch):
    monkeypatch.setattr("darkbloom_core.media._work.GRACE_SECONDS", 0.1)
    seam = HeldSeam()
    job = workers(decode_seconds=0.1).begin([image()], seam, CONTEXT)
    assert seam.entered.wait(20)
    threading.Event().wait(0.3)
    assert job.is_overdue
    seam.go_on.set()
    job.future.exception(20)


def test_the_caps_over_a_whole_request_hold_to_the_pixel(workers):
    two = [image(data_uri(flat_png(100, 50), "image/png"), number) for number in range(2)]
    assert prepare(workers(request_image_pixels=10_000), *two)
    with pytest.raises(InvalidRequest, match="more than 9999 pixels together"):
        prepare(workers(request_image_pixels=9_999), *two)
    clips = [clip(number=number) for number in range(2)]
    assert prepare(workers(videos=2), *clips)
    with pytest.raises(InvalidRequest, match="at most 1 videos") as refusal:
        prepare(workers(videos=1), *clips)
    assert refusal.value.param == "part1"
    pixels = 2 * 6 * 32 * 48
    assert prepare(workers(video_frame_pixels=pixels), *clips)
    with pytest.raises(InvalidRequest, match=f"more than {pixels - 1} pixels together"):
        prepare(workers(video_frame_pixels=pixels - 1), *clips)
    with pytest.raises(InvalidRequest, match="at most 10 are allowed"):
        prepare(workers(part_bytes=10), image())


def test_more_than_the_context_holds_is_refused_before_anything_is_decoded(workers):
    """A picture of 32 x 48 is 6 tokens, and so is each of the clip's 6 frames."""
    sources, one = [image(), clip(number=1), image(number=2)], workers()
    one.begin(sources, CellSeam(), 48).future.result(20).release()
    seam = HeldSeam()
    with pytest.raises(ContextLengthExceeded, match="take 48 tokens of the prompt or more") as refusal:
        one.begin(sources, seam, 47).future.result(20)
    assert refusal.value.param == "part2"
    assert not seam.entered.is_set()


def test_a_shape_that_the_model_cannot_take_names_its_part(workers):
    with pytest.raises(InvalidRequest, match="part0: the picture is smaller"):
        prepare(workers(), image(data_uri(flat_png(8, 8), "image/png")))


BOMBS = """
from media_files import *
from peaks import grown_bytes
from test_media_video import numbered_frames, video_file, with_claims, with_duration, with_long_frames
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.media import MediaSource, MediaWorkers
from darkbloom_core.memory import Ledger
from darkbloom_core.settings import MediaSettings

workers, short = MediaWorkers(MediaSettings(), Ledger()), video_file(numbered_frames(20), options={"bf": "0"})

def refuse(kind, uri):
    source = MediaSource(kind, uri, "part0")
    refusal = workers.begin([source], CellSeam(), 100_000).future.exception(60)
    assert isinstance(refusal, InvalidRequest), refusal

small = picture_file(Image.new("RGB", (64, 64)))
for kind, data in (("image", small), ("video", short)):  # what the libraries take once is there
    workers.begin([MediaSource(kind, data_uri(data, ""), "")], CellSeam(), 100_000).future.result(60)
files = [
    ("image", flat_png(16_000, 16_000)), ("image", long_gif(100_000)),
    ("image", wide_webp(16_383, 16_383)), ("image", long_webp(100_000)),
    ("video", with_duration(short, b"mvhd", 1e5)), ("video", with_duration(short, b"mdhd", 0.1)),
    ("video", with_long_frames(short, 10_000)), ("video", with_claims(short, 90_000_000)),
]
for name in sys.argv[1:]:  # of frames that are too large
    large = open(name, "rb").read()
    files += [("video", large), ("video", with_small_frames(large))]
for kind, data in files:
    uri = data_uri(data, "")
    print(grown_bytes(lambda: refuse(kind, uri)) // 1_000_000)
"""

WORKING = """
from peaks import grown_bytes
from darkbloom_core.media import MediaSource
from darkbloom_core.media._picture import inspect_picture, decode_picture
from darkbloom_core.settings import MediaSettings

source, limits = MediaSource("image", "", "x"), MediaSettings()
small, large = (open(name, "rb").read() for name in sys.argv[1:])
facts = [inspect_picture(source, data, limits) for data in (small, large)]
decode_picture(source, small, facts[0])
print(grown_bytes(lambda: decode_picture(source, large, facts[1])), facts[1].working_bytes)
"""


def test_bombs_are_refused_with_little_memory():
    """Too many pixels, frames, or seconds, or a header that lies about them."""
    grown = printed_numbers(BOMBS)
    assert len(grown) == 8
    assert max(grown) < 50, grown


@pytest.mark.soak
def test_a_video_of_frames_that_are_too_large_is_refused_with_little_memory(tmp_path):
    """Even if only the stream itself says how large they are."""
    large = tmp_path / "large.mp4"
    large.write_bytes(large_frame_video(11_200, 9_008))
    grown = printed_numbers(BOMBS, str(large))
    assert len(grown) == 10
    assert max(grown) < 50, grown


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "PNG"}, {"kind": "JPEG", "quality": 90}, {"kind": "JPEG", "quality": 90, "progressive": True},
        {"kind": "WEBP", "quality": 80}, {"kind": "WEBP", "lossless": True, "method": 0},
    ],
)  # fmt: skip
def test_decoding_takes_no_more_than_was_reserved(options, tmp_path):
    """Of a photograph that must be turned, too."""
    turned = Image.Exif()
    turned[0x0112] = 6
    for name, size in (("small", (64, 64)), ("large", (2000, 1500))):
        picture = Image.effect_noise(size, 80).convert("RGB")
        (tmp_path / name).write_bytes(picture_file(picture, exif=turned, **options))
    grown, reserved = printed_numbers(WORKING, str(tmp_path / "small"), str(tmp_path / "large"))
    assert 0 < grown <= reserved
