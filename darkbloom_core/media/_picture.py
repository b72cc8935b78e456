"""Still pictures: what the header says, and the pixels.

Always true: the size in pixels is known and within the limits before anything is decoded;
of an animated picture only the first frame is; pixels come the right way up. Pillow does
the decoding and is imported when the first picture comes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from darkbloom_core.media._headers import Format, gif_frames, parts_apart, sniff, webp_frames, webp_size
from darkbloom_core.media._source import MediaSource
from darkbloom_core.settings import MediaSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BYTES_PER_PIXEL = {"PNG": 14, "JPEG": 14, "GIF": 14, "WEBP": 20, "HEIF": 20}
"""What decoding takes at its peak: the library's raster, a converted or turned copy, a decoder's own planes."""

OVERHEAD_BYTES = 2 * 1024**2
BAND_PIXELS = 1_000_000
TEXT_BYTES = 4 * 1024**2
"""What all compressed text in a PNG may unpack to."""

MOST_PARTS = 10_000
"""Segments of a JPEG or chunks of a PNG beside its pixels; real files have some dozens."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "HEIF")


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """``width`` and ``height`` as the file stores them: a picture may have to be turned."""

    format: Format
    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def working_bytes(self) -> int:
        """What decoding takes at its peak, the file apart."""
        return self.pixels * BYTES_PER_PIXEL[self.format] + OVERHEAD_BYTES


def inspect_picture(source: MediaSource, data: bytes, limits: MediaSettings) -> PictureFacts:
    """Read the header of ``data``. Raises ``InvalidRequest`` for anything that will not be decoded."""
    if not _has_pillow():
        raise source.fault(
            "images need the package pillow, which this server lacks; darkbloom-core's extra pictures brings it"
        )
    found = sniff(data)
    if found is None or found not in _FORMATS:
        raise source.fault(f"the image is not a {_known()} file")
    if found == "HEIF" and not _reads_heif():
        raise source.fault(
            f"HEIC needs the package pillow-heif, which this server lacks; send a {_known()} file"
        )
    if parts_apart(data, MOST_PARTS) > MOST_PARTS:
        raise source.fault(f"the image has more than {MOST_PARTS} segments or chunks beside its pixels")
    try:
        width, height = webp_size(data) if found == "WEBP" else _open(source, data).size
    except ValueError:
        raise source.fault("the image cannot be read") from None
    facts = PictureFacts(found, width, height)
    if facts.pixels == 0:
        raise source.fault("the image has no pixels")
    if facts.pixels > limits.image_pixels:
        raise source.fault(
            f"the image has {width} x {height} pixels, and at most {limits.image_pixels} are allowed"
        )
    most = limits.image_frames
    if _frames(source, data, found, most) > most:
        raise source.fault(f"the image has more than {most} frames")
    return facts


def _frames(source: MediaSource, data: bytes, found: Format, most: int) -> int:
    """How many there are; more than ``most`` need not be counted to the end."""
    if found == "GIF":
        return gif_frames(data, most)
    if found == "WEBP":
        return webp_frames(data)
    return int(getattr(_open(source, data), "n_frames", 1))


def decode_picture(source: MediaSource, data: bytes, facts: PictureFacts) -> NDArray[np.uint8]:
    """``[height, width, 3]``, turned as its EXIF data says. Raises ``InvalidRequest`` for damaged data."""
    image = _open(source, data)
    try:
        if image.size != (facts.width, facts.height):
            raise ValueError("the header was another one")
        image.load()
        image = _turned(image)
        return _pixels(_rgb(image))
    except MemoryError:
        raise
    except Exception:  # decoders raise whatever their format makes them; the text could quote the file
        raise source.fault("the image is damaged") from None


def _open(source: MediaSource, data: bytes) -> Any:
    """Pillow's lazy image: the header is read, the raster is not."""
    try:
        return _pillow().open(io.BytesIO(data), formats=_FORMATS if _reads_heif() else _FORMATS[:-1])
    except MemoryError:
        raise
    except Exception:
        raise source.fault("the image cannot be read") from None


def _turned(image: Any) -> Any:
    """In place: a copy of a picture that stands right would be one too many, made while no other thread runs.

    Its pixels are loaded, so what is raised but for a lack of memory is about EXIF data that cannot be read.
    """
    from PIL import ImageOps

    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:
        return image  # as every browser shows it
    return image


def _rgb(image: Any) -> Any:
    """Transparency is dropped, not laid over anything, as the processors of ``transformers`` do."""
    image.info.pop("transparency", None)
    if image.mode.startswith("I"):  # 16 bits, which a plain conversion would clip
        image = image.convert("I").point(lambda value: value / 257).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


def _pixels(image: Any) -> NDArray[np.uint8]:
    """Copied band by band: asked for all at once, Pillow makes two copies."""
    import numpy as np

    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, BAND_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        pixels[top:bottom] = np.asarray(image.crop((0, top, width, bottom)))
    return pixels


@cache
def _pillow() -> Any:
    """Pillow's module of images; its own limits are off, or tighter than they come, since ours are checked first."""
    from PIL import Image, PngImagePlugin

    Image.MAX_IMAGE_PIXELS = None
    PngImagePlugin.MAX_TEXT_MEMORY = TEXT_BYTES
    return Image


def _has_pillow() -> bool:
    try:
        _pillow()
    except ImportError:
        return False
    return True


@cache
def _reads_heif() -> bool:
    try:
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return False
    register_heif_opener()
    return True


def _known() -> str:
    return "PNG, JPEG, WebP, GIF or HEIC" if _reads_heif() else "PNG, JPEG, WebP or GIF"
