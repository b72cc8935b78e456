"""Videos: how long and how large they are, and a few frames of them, each found by seeking.

Always true: duration and frame count come from the packets in the file, not from what its
header claims; nothing is decoded before the frames that were asked for; only MP4, MOV and
WebM are opened, by the demuxer for exactly that format, so no playlist and no reference to
another file is followed. PyAV does the decoding and is imported when the first video comes.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any

from darkbloom_core.errors import InvalidRequest
from darkbloom_core.media._headers import mp4_durations, mp4_entries, sniff, webm_described_bytes
from darkbloom_core.media._source import MediaSource
from darkbloom_core.settings import MediaSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BYTES_PER_PIXEL = 48
"""What decoding takes at its peak for each pixel of a frame: the decoder's reference frames, and one in RGB."""

OVERHEAD_BYTES = 8 * 1024**2
MOST_PACKETS_PER_SECOND = 250
DECODER_THREADS = 2

MOST_ENTRIES = 1_000_000
"""Of an MP4's tables, all tracks together: the demuxer takes up to 40 bytes for each when it opens the file."""
DESCRIBED_BYTES = 1024**2
"""Of a WebM, beside its frames: the demuxer keeps up to fifty times as many when it opens the file."""

PADDING_PIXELS = 256
"""What a decoder may add to a frame's sides while it works on it."""

LIE_SECONDS, LIE_FACTOR = 1.0, 2.0
"""A header that is wrong about a duration by both is a lie."""

_DEMUXERS = {"MP4": "mov", "WEBM": "matroska"}
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mjpeg", "prores")

Check = Callable[[], None]
"""Raises if the work should not go on."""


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """``width`` and ``height`` are the largest of any track, coded or shown. ``stamps`` are those of all
    frames in order of time and ``keys`` those from which decoding can start, in units of the stream's time
    base."""

    width: int
    height: int
    time_base: Fraction
    stamps: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def working_bytes(self) -> int:
        """What decoding takes at its peak, the file apart."""
        return self.pixels * BYTES_PER_PIXEL + OVERHEAD_BYTES

    def sampled(self, most: int) -> tuple[int, ...]:
        """Stamps of up to ``most`` frames, uniformly from the first on."""
        total = len(self.stamps)
        count = min(most, total)
        return tuple(self.stamps[index * total // count] for index in range(count))

    def seconds(self, stamp: int) -> float:
        """When the frame of ``stamp`` is shown, counted from the first one."""
        return float((stamp - self.stamps[0]) * self.time_base)


def inspect_video(source: MediaSource, data: bytes, limits: MediaSettings, check: Check) -> VideoFacts:
    """Walk through the packets of ``data``; no frame is decoded.

    Raises ``InvalidRequest`` for anything that will not be decoded.
    """
    with _opened(source, data) as (container, stream):
        packets = iter(container.demux(stream))
        first = next(packets, None)
        width, height = _largest_size(container, stream, first)
        if width * height == 0:
            raise source.fault("the video does not say how large its frames are")
        if width * height > limits.image_pixels:
            raise source.fault(
                f"the video has frames of {width} x {height} pixels, and at most {limits.image_pixels} are allowed"
            )
        _check_durations(source, data, container, limits)
        stamps, keys = _packets(source, chain([] if first is None else [first], packets), limits, check)
        time_base = Fraction(stream.time_base)
    seconds = float((stamps[-1] - stamps[0]) * time_base)
    if seconds > limits.video_seconds:
        raise _too_long(source, seconds, limits)
    return VideoFacts(width, height, time_base, tuple(stamps), tuple(keys))


def decode_frames(
    source: MediaSource, data: bytes, facts: VideoFacts, stamps: tuple[int, ...], check: Check
) -> Iterator[NDArray[np.uint8]]:
    """The frames at ``stamps``, which ascend, each ``[height, width, 3]`` and the right way up.

    From one to the next it seeks only where a frame that decoding can start from lies
    between them. Raises ``InvalidRequest`` for damaged data.
    """
    with _opened(source, data) as (container, stream):
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = DECODER_THREADS
        padded = (facts.width + PADDING_PIXELS) * (facts.height + PADDING_PIXELS)
        stream.codec_context.options = {"max_pixels": str(padded)}
        reached: int | None = None
        frames: Iterator[Any] = iter(())
        for stamp in stamps:
            key = facts.keys[max(0, bisect_right(facts.keys, stamp) - 1)]
            if reached is None or key > reached:
                frames = _from(container, stream, key)
            frame = _next_at(frames, stamp, check)
            if frame is None or (frame.pts > stamp and key > facts.keys[0]):
                frames = _from(container, stream, facts.keys[0])  # the seek went past it
                frame = _next_at(frames, stamp, check)
            if frame is None or frame.width * frame.height > facts.pixels:
                raise source.fault("the video is damaged")
            reached = frame.pts
            yield _upright(frame)


@contextmanager
def _opened(source: MediaSource, data: bytes) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream; whatever the library raises inside is a damaged video."""
    demuxer = _DEMUXERS.get(sniff(data) or "")
    if demuxer is None:
        raise source.fault("the video is not an MP4, MOV or WebM file")
    entries = mp4_entries(data, MOST_ENTRIES) if demuxer == "mov" else 0
    if entries is None or entries > MOST_ENTRIES:
        raise source.fault(f"the video's tables are compressed or claim more than {MOST_ENTRIES} entries")
    if demuxer == "matroska" and webm_described_bytes(data) > DESCRIBED_BYTES:
        raise source.fault(f"the video has more than {DESCRIBED_BYTES} bytes that are not frames")
    try:
        import av
    except ImportError:
        raise source.fault(
            "videos need the package av, which this server lacks; darkbloom-core's extra media brings it"
        ) from None
    options = {"protocol_whitelist": "none", "codec_whitelist": "none"}  # or opening it would decode frames
    try:
        with av.open(
            io.BytesIO(data), format=demuxer, options=options, metadata_errors="replace"
        ) as container:
            if not container.streams.video:
                raise source.fault("the video has no picture track")
            stream = container.streams.video[0]
            if stream.codec_context is None or stream.codec_context.codec.canonical_name not in _CODECS:
                raise source.fault(f"the video is in none of the codecs {', '.join(_CODECS)}")
            yield container, stream
    except (av.FFmpegError, ValueError, OverflowError):  # their text could quote the file
        raise source.fault("the video is damaged, or in a codec that is not known here") from None


def _largest_size(container: Any, stream: Any, first: Any) -> tuple[int, int]:
    """Of all that the container's headers say, and the first packet of ``stream`` where a parser can tell."""
    contexts = [each.codec_context for each in container.streams.video if each.codec_context is not None]
    contexts.append(_parsed(stream, first))
    sizes = [(each.width, each.height) for each in contexts]
    sizes += [(each.coded_width, each.coded_height) for each in contexts]
    return max(sizes, key=lambda size: size[0] * size[1])


def _parsed(stream: Any, packet: Any) -> Any:
    """What ``packet`` itself says, which is what a decoder goes by; nothing is decoded."""
    import av

    context = av.CodecContext.create(stream.codec_context.codec.canonical_name, "r")
    if stream.codec_context.extradata:
        context.extradata = stream.codec_context.extradata
    if packet is not None and packet.size:
        context.parse(bytes(packet))
    return context


def _check_durations(source: MediaSource, data: bytes, container: Any, limits: MediaSettings) -> None:
    """Refuse what is too long, and a header that says something else than the tables of frames do."""
    found = [float(each.duration * each.time_base) for each in container.streams if each.duration]
    if container.duration:
        found.append(container.duration / 1_000_000)
    if max(found, default=0.0) > limits.video_seconds:
        raise _too_long(source, max(found), limits)
    whole, tracks = mp4_durations(data) if sniff(data) == "MP4" else (None, [])
    claims = [(claim, found) for claim in tracks]
    if whole is not None:
        claims.append((whole, [max(found)] if found else []))
    for claim, durations in claims:
        if durations and all(_is_lie(claim, seconds) for seconds in durations):
            raise source.fault("the video's header lies about how long it is")


def _is_lie(claim: float, seconds: float) -> bool:
    low, high = sorted((claim, seconds))
    return high - low > LIE_SECONDS and high > LIE_FACTOR * low


def _packets(
    source: MediaSource, packets: Iterable[Any], limits: MediaSettings, check: Check
) -> tuple[list[int], list[int]]:
    """When each frame is shown, and from which packets decoding can start."""
    stamps: list[int] = []
    keys: list[int] = []
    most = int(limits.video_seconds * MOST_PACKETS_PER_SECOND)
    for count, packet in enumerate(packets):
        if count % 256 == 0:
            check()
        if count > most:
            raise source.fault(f"the video has more than {most} frames")
        if packet.pts is None or packet.size == 0 or packet.is_discard:
            continue
        stamps.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
    if not stamps or not keys:
        raise source.fault("the video has no frames")
    return sorted(set(stamps)), sorted(keys)


def _from(container: Any, stream: Any, stamp: int) -> Iterator[Any]:
    container.seek(stamp, stream=stream, backward=True)
    return iter(container.decode(stream))


def _next_at(frames: Iterator[Any], stamp: int, check: Check) -> Any | None:
    """The first frame that is shown at ``stamp`` or later; None if there is none."""
    for frame in frames:
        check()
        if frame.pts is not None and frame.pts >= stamp:
            return frame
    return None


def _upright(frame: Any) -> NDArray[np.uint8]:
    import numpy as np

    pixels = frame.to_ndarray(format="rgb24")
    turns = round((frame.rotation or 0) / 90) % 4  # degrees, counter-clockwise
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def _too_long(source: MediaSource, seconds: float, limits: MediaSettings) -> InvalidRequest:
    return source.fault(
        f"the video lasts {seconds:.0f} seconds, and at most {limits.video_seconds:g} are allowed"
    )
