"""How the family sees: what the core asks of a ``VisionSeam``, over the processor and the tower."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from darkbloom_core.contracts import PreparedPicture
from darkbloom_gemma4._processor import Processor
from darkbloom_gemma4._vision import Vision

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


PARTS_ON_CPU = 8
"""Parts of a layer of the tower: a whole one takes a second of text on a CPU, and a thousandth of that on a GPU."""


class Gemma4Vision:
    """The family's ``VisionSeam``. See the contract for each member.

    What the core calls a layer is one of ``parts`` of one. A picture is always cut alike, so its
    bits do not depend on what runs beside it.
    """

    def __init__(self, tower: Vision, processor: Processor, parts: int) -> None:
        self._tower = tower
        self._processor = processor
        self._parts = parts

    @property
    def tower_layers(self) -> int:
        return self._tower.layer_count * self._parts

    @property
    def most_soft_tokens(self) -> int:
        return max(self._processor.image_tokens, self._processor.frame_tokens)

    @property
    def most_frames(self) -> int:
        return self._processor.frames

    @property
    def soft_token_bytes(self) -> int:
        return self._processor.soft_token_bytes

    def soft_tokens(self, height: int, width: int, *, video: bool) -> int:
        rows, columns = self._processor.cells(height, width, video=video)
        return rows * columns

    def prepare(self, pixels: NDArray[np.uint8], *, video: bool) -> PreparedPicture:
        return self._processor.prepare(pixels, video=video)

    def start(self, picture: PreparedPicture) -> tuple[mx.array, ...]:
        """Hidden states ``[1, P, hidden]`` and positions ``[1, P, 2]``."""
        patches = mx.array(picture.arrays["patches"])[None].astype(mx.float32) * (1 / 255)
        positions = mx.array(picture.arrays["positions"])[None]
        return self._tower.embed(patches, positions), positions

    def run_layers(self, inputs: tuple[mx.array, ...], first: int, last: int) -> tuple[mx.array, ...]:
        return self._tower.run_parts(inputs, None, first, last, self._parts)

    def finish(self, inputs: tuple[mx.array, ...]) -> mx.array:
        x, positions = inputs
        return self._tower.finish(x, positions)[0]
