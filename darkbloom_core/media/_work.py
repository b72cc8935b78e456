"""The work that turns a request's pictures and videos into what a model's tower takes, in threads of its own.

Always true: caps are checked, and the bytes that will be needed are reserved, before
anything is decoded; what is reserved for the work is released by the work itself when it
unwinds, once, however it ends; what is reserved for its result is released by whoever took
the result, or by the work if nobody wants it any more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from darkbloom_core.contracts import MediaPart, PreparedPicture, VisionSeam
from darkbloom_core.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
)
from darkbloom_core.media._picture import PictureFacts, decode_picture, inspect_picture
from darkbloom_core.media._source import MediaSource, read_source
from darkbloom_core.media._video import VideoFacts, decode_frames, inspect_video
from darkbloom_core.memory import Ledger
from darkbloom_core.settings import MediaSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GRACE_SECONDS = 2.0
"""How much longer than its time a piece of work is waited for: one call into a decoder cannot be interrupted."""

NICENESS = 10
"""Of the threads that decode, on Linux: beside the model's own, which has 0, they get about a tenth of a core that both want."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """Parts in the order of the sources, and all their pictures in the same order.

    ``release`` gives back what is reserved for the pictures; call it when they are not
    needed any more, as often as you like.
    """

    parts: tuple[MediaPart, ...]
    pictures: tuple[PreparedPicture, ...]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Planned:
    """One source after a look at its header. ``stamps`` are the frames to take of a video.

    ``least_tokens`` and ``prepared_bytes`` allow for a picture that has to be turned.
    """

    source: MediaSource
    data: bytes
    facts: PictureFacts | VideoFacts
    stamps: tuple[int, ...]
    least_tokens: int
    prepared_bytes: int


class MediaWorkers:
    """Thread-safe. ``ledger`` is where the bytes of the work and of its results are reserved."""

    def __init__(self, limits: MediaSettings, ledger: Ledger) -> None:
        self._limits = limits
        self._ledger = ledger
        self._workers = limits.workers or (2 if _cores() > 2 else 1)
        self._pool = ThreadPoolExecutor(
            self._workers, thread_name_prefix="media", initializer=_yield_to_the_model
        )
        self._lock = threading.Lock()
        self._begun = 0

    def begin(self, sources: Sequence[MediaSource], seam: VisionSeam, context_tokens: int) -> MediaJob:
        """Start the work on all of one request's ``sources``. Raises ``QueueFull`` if too much of it waits.

        More than ``context_tokens`` soft tokens are refused before anything is decoded.
        """
        with self._lock:
            if self._begun >= self._workers + self._limits.waiting_limit:
                raise QueueFull(f"{self._begun} requests with pictures are being read or wait for it")
            self._begun += 1
        job = MediaJob(sources, seam, context_tokens, self._limits, self._ledger)
        job.future = self._pool.submit(job.run)
        job.future.add_done_callback(self._ended)
        return job

    @property
    def count(self) -> int:
        """How many requests' media are read at once."""
        return self._workers

    def close(self) -> None:
        """Begin nothing more. What runs comes to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, _: Future[PreparedMedia]) -> None:
        with self._lock:
            self._begun -= 1


class MediaJob:
    """The work on one request's media. ``future`` has its result, or what was wrong with the request."""

    future: Future[PreparedMedia]

    def __init__(
        self,
        sources: Sequence[MediaSource],
        seam: VisionSeam,
        context_tokens: int,
        limits: MediaSettings,
        ledger: Ledger,
    ) -> None:
        self._sources = sources
        self._seam = seam
        self._context_tokens = context_tokens
        self._limits = limits
        self._ledger = ledger
        self._key = f"media {next(_numbers)}"
        self._abandoned = threading.Event()
        self._began: float | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether it runs for so long that whoever waits should give up."""
        if self._began is None:
            return False
        return time.monotonic() - self._began > self._limits.decode_seconds + GRACE_SECONDS

    def too_slow(self) -> InvalidRequest:
        """What to say of work that takes too long."""
        return self._sources[0].fault(
            f"the request's pictures and videos took longer than {self._limits.decode_seconds:g} seconds to decode"
        )

    def abandon(self) -> None:
        """Nobody wants the result any more: stop at the next chance, and give everything back."""
        self._abandoned.set()
        if not self.future.cancel():
            self.future.add_done_callback(_give_back)

    def run(self) -> PreparedMedia:
        """Called by the worker's thread."""
        self._began = time.monotonic()
        self._check()
        planned = self._plan()
        result_key = f"{self._key} prepared"
        release = partial(self._ledger.release, result_key)
        try:
            self._reserve(planned, result_key)
            parts, pictures = self._decode(planned)
        except BaseException:
            release()
            raise
        finally:
            self._ledger.release(self._key)
        self._ledger.resize(result_key, sum(_size(picture) for picture in pictures))
        return PreparedMedia(parts, pictures, release)

    # --- inside --------------------------------------------------------------------------

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise RequestCancelled("the client has gone")
        if self._began is not None and time.monotonic() - self._began > self._limits.decode_seconds:
            raise self.too_slow()

    def _plan(self) -> list[_Planned]:
        """Look at every header and check every cap."""
        limits = self._limits
        videos = [source for source in self._sources if source.kind == "video"]
        if len(videos) > limits.videos:
            raise videos[limits.videos].fault(f"at most {limits.videos} videos are allowed in one request")
        planned: list[_Planned] = []
        picture_pixels = frame_pixels = tokens = 0
        for source in self._sources:
            self._check()
            one = self._plan_one(source)
            planned.append(one)
            if one.stamps:
                frame_pixels += one.facts.pixels * len(one.stamps)
            else:
                picture_pixels += one.facts.pixels
            if picture_pixels > limits.request_image_pixels:
                raise source.fault(
                    f"the request's images have more than {limits.request_image_pixels} pixels together"
                )
            if frame_pixels > limits.video_frame_pixels:
                raise source.fault(
                    f"the frames to be taken of the request's videos have more than "
                    f"{limits.video_frame_pixels} pixels together"
                )
            tokens += one.least_tokens
            if tokens > self._context_tokens:
                raise ContextLengthExceeded(
                    f"{source.where}: the pictures up to this one take {tokens} tokens of the prompt or more, "
                    f"and the model's context has {self._context_tokens}",
                    param=source.where,
                )
        return planned

    def _plan_one(self, source: MediaSource) -> _Planned:
        data = read_source(source, self._limits.part_bytes)
        facts: PictureFacts | VideoFacts
        stamps: tuple[int, ...] = ()
        if source.kind == "image":
            facts = inspect_picture(source, data, self._limits)
        else:
            facts = inspect_video(source, data, self._limits, self._check)
            stamps = facts.sampled(min(self._limits.sampled_frames, self._seam.most_frames))
        sides = (facts.height, facts.width)
        tokens = sorted((self._soft_tokens(source, *sides), self._soft_tokens(source, *reversed(sides))))
        pictures = max(1, len(stamps))
        size = tokens[1] * pictures * self._seam.soft_token_bytes
        return _Planned(source, data, facts, stamps, tokens[0] * pictures, size)

    def _reserve(self, planned: Sequence[_Planned], result_key: str) -> None:
        """Sources are decoded one after the other, so the largest one's working memory is enough for all."""
        working = sum(len(one.data) for one in planned) + max(one.facts.working_bytes for one in planned)
        prepared = sum(one.prepared_bytes for one in planned)
        is_held = self._is_held
        if not (
            self._ledger.reserve(self._key, working, "media", "host", is_held=is_held)
            and self._ledger.reserve(result_key, prepared, "media", "host", is_held=is_held)
        ):
            raise CapacityExhausted(
                f"decoding the request's pictures and videos may take {working + prepared} bytes, "
                "which are not free now",
                retry_after_seconds=5,
            )

    def _is_held(self) -> bool:
        return True  # every way out of the work releases, so what is still there is still needed

    def _decode(
        self, planned: Sequence[_Planned]
    ) -> tuple[tuple[MediaPart, ...], tuple[PreparedPicture, ...]]:
        parts: list[MediaPart] = []
        pictures: list[PreparedPicture] = []
        for one in planned:
            is_video = one.source.kind == "video"
            made = [self._prepare(one.source, pixels, video=is_video) for pixels in self._pixels(one)]
            seconds: tuple[float, ...] = ()
            if isinstance(one.facts, VideoFacts):
                seconds = tuple(one.facts.seconds(stamp) for stamp in one.stamps)
            parts.append(MediaPart(one.source.kind, tuple(each.soft_tokens for each in made), seconds))
            pictures += made
        return tuple(parts), tuple(pictures)

    def _pixels(self, one: _Planned) -> Iterator[NDArray[np.uint8]]:
        self._check()
        if isinstance(one.facts, PictureFacts):
            yield decode_picture(one.source, one.data, one.facts)
        else:
            yield from decode_frames(one.source, one.data, one.facts, one.stamps, self._check)

    def _prepare(self, source: MediaSource, pixels: NDArray[np.uint8], *, video: bool) -> PreparedPicture:
        self._check()
        try:
            return self._seam.prepare(pixels, video=video)
        except InvalidRequest as refusal:
            raise source.fault(refusal.message) from None

    def _soft_tokens(self, source: MediaSource, height: int, width: int) -> int:
        try:
            return self._seam.soft_tokens(height, width, video=source.kind == "video")
        except InvalidRequest as refusal:
            raise source.fault(refusal.message) from None


def _cores() -> int:
    """Of the machine, as far as this process may use them."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _yield_to_the_model() -> None:
    """Where threads have priorities of their own, as on Linux, this one's is low: who waits for a picture waits anyway."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _size(picture: PreparedPicture) -> int:
    return sum(array.nbytes for array in picture.arrays.values())


def _give_back(done: Future[PreparedMedia]) -> None:
    if not done.cancelled() and done.exception() is None:
        done.result().release()
