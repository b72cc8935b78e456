"""Pictures to patches, as the publisher's processor makes them: resized with their aspect kept, then cut up.

The settings are those of the checkpoint's ``processor_config.json``, else of
``preprocessor_config.json`` (and ``video_preprocessor_config.json``), else the publisher's
defaults. One that this plugin does not know how to follow is an ``UnsupportedCheckpoint``.
Resizing is Pillow's, so patches have the bits of the reference's Pillow processor; they
stay bytes until they are on the device.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from darkbloom_core.checkpoint import read_json
from darkbloom_core.contracts import PreparedPicture
from darkbloom_core.errors import InvalidRequest
from darkbloom_gemma4._fields import Fields
from darkbloom_gemma4._vision_config import VisionConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIGEST_DOMAIN = b"darkbloom gemma4 picture 1"
IMAGE_SOFT_TOKENS, FRAME_SOFT_TOKENS, FRAMES = 280, 70, 32
"""The publisher's defaults."""

BICUBIC = 3
RESAMPLES = (0, 1, 2, 3, 4, 5)
RESCALE = 1 / 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """``image_tokens`` and ``frame_tokens``: at most how many soft tokens a picture, and a frame, becomes."""

    patch_pixels: int
    pooling: int
    image_tokens: int = IMAGE_SOFT_TOKENS
    frame_tokens: int = FRAME_SOFT_TOKENS
    frames: int = FRAMES
    resample: int = BICUBIC

    @classmethod
    def of(cls, vision: VisionConfig) -> Processor:
        """With the publisher's defaults."""
        return cls(patch_pixels=vision.patch_pixels, pooling=vision.pooling)

    @property
    def cell_pixels(self) -> int:
        """The side of what becomes one soft token."""
        return self.patch_pixels * self.pooling

    @property
    def soft_token_bytes(self) -> int:
        """Bytes of the patches behind one soft token, and of their positions."""
        return self.pooling**2 * (3 * self.patch_pixels**2 + 2 * np.dtype(np.int32).itemsize)

    def cells(self, height: int, width: int, *, video: bool) -> tuple[int, int]:
        """(rows, columns) of soft tokens: the largest that keep the aspect and stay within the limit.

        A picture so narrow that a side would vanish gets one cell there, as in the reference.
        """
        most = self.frame_tokens if video else self.image_tokens
        if height < 1 or width < 1:
            raise InvalidRequest("the picture has no pixels")
        factor = math.sqrt(most * self.pooling**2 * self.patch_pixels**2 / (height * width))
        rows, columns = (math.floor(factor * side / self.cell_pixels) for side in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, most)
        elif columns == 0:
            rows, columns = min(height // width, most), 1
        return rows, columns

    def prepare(self, pixels: NDArray[np.uint8], *, video: bool) -> PreparedPicture:
        """``patches`` uint8 ``[P, 3 * patch_pixels**2]`` and ``positions`` int32 ``[P, 2]`` (column, row)."""
        height, width = pixels.shape[:2]
        rows, columns = self.cells(height, width, video=video)
        resized = self._resized(pixels, rows * self.cell_pixels, columns * self.cell_pixels)
        down, across, side = rows * self.pooling, columns * self.pooling, self.patch_pixels
        cut = resized.reshape(down, side, across, side, 3).transpose(0, 2, 1, 3, 4)
        patches = np.ascontiguousarray(cut).reshape(down * across, side * side * 3)
        grid = np.indices((down, across), np.int32)
        positions = np.stack([grid[1].reshape(-1), grid[0].reshape(-1)], axis=-1)
        digest = hashlib.sha256(DIGEST_DOMAIN + np.array([down, across, side], "<u4").tobytes())
        digest.update(patches.data)
        return PreparedPicture(rows * columns, {"patches": patches, "positions": positions}, digest.digest())

    def _resized(self, pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
        if pixels.shape[:2] == (height, width):
            return pixels
        from PIL import Image

        image = Image.fromarray(pixels).resize((width, height), resample=Image.Resampling(self.resample))
        return np.asarray(image)


def read_processor(path: Path, vision: VisionConfig) -> Processor:
    """The processor that the checkpoint folder ``path`` describes."""
    image, video = _tables(path)
    found: dict[str, Any] = {"image_tokens": IMAGE_SOFT_TOKENS, "frame_tokens": FRAME_SOFT_TOKENS}
    for name, fields in (("image_tokens", image), ("frame_tokens", video)):
        if fields is None:
            continue
        _check(fields, vision, found)
        found[name] = fields.integer("max_soft_tokens", found[name])
    frames = FRAMES if video is None else video.integer("num_frames", FRAMES)
    return Processor(patch_pixels=vision.patch_pixels, pooling=vision.pooling, frames=frames, **found)


def _tables(path: Path) -> tuple[Fields | None, Fields | None]:
    """What is said of images and of videos."""
    both = _read(path / "processor_config.json")
    image = None if both is None else both.table("image_processor")
    video = None if both is None else both.table("video_processor")
    return (
        image or _read(path / "preprocessor_config.json"),
        video or _read(path / "video_preprocessor_config.json"),
    )


def _read(file: Path) -> Fields | None:
    return Fields(read_json(file), file=str(file)) if file.exists() else None


def _check(fields: Fields, vision: VisionConfig, found: dict[str, Any]) -> None:
    """Refuse what would make other patches than ``Processor.prepare`` does."""
    for name, own in (("patch_size", vision.patch_pixels), ("pooling_kernel_size", vision.pooling)):
        if fields.integer(name, own) != own:
            fields.refuse(name, f"is not {own}, which config.json says")
    for name in ("do_resize", "do_rescale", "do_convert_rgb"):
        if not fields.boolean(name, True):
            fields.refuse(name, "is false: only true is known")
    if not math.isclose(fields.number("rescale_factor", RESCALE), RESCALE, rel_tol=1e-9):
        fields.refuse("rescale_factor", "is not 1/255")
    if fields.boolean("do_normalize", False):
        for name, same in (("image_mean", 0), ("image_std", 1)):
            if any(value != same for value in fields.get(name) or ()):
                fields.refuse(name, f"is not {same} throughout: nothing else is known")
    resample = fields.integer("resample", BICUBIC, least=0)
    if resample not in RESAMPLES or found.setdefault("resample", resample) != resample:
        fields.refuse("resample", f"is {resample}: not known, or another one than of images")
