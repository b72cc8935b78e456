"""Pictures as descriptions: a background, up to four shapes, noise, and a size in cells.

Drawn twice, independently: from 34 numbers on the GPU while training (``painting``), and
with PIL for tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Color = tuple[int, int, int]

COLORS: dict[str, Color] = {
    "red": (222, 32, 30),
    "green": (28, 150, 48),
    "blue": (36, 66, 220),
    "yellow": (242, 224, 40),
    "orange": (246, 138, 18),
    "purple": (120, 36, 168),
    "pink": (246, 150, 196),
    "cyan": (48, 214, 224),
    "black": (14, 14, 14),
    "white": (243, 243, 243),
}
SHAPES = ("circle", "square", "triangle")

CELL_PIXELS = 48
"""A soft token sees a cell of this many pixels each way: 3 x 3 patches of 16."""

CELLS_AT_MOST = 70
SHAPES_AT_MOST = 4
NUMBERS = 6 + 7 * SHAPES_AT_MOST
"""What ``pack`` makes of a picture."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``kind`` counts in ``SHAPES``. The centre is in widths and heights, the radius in shorter sides."""

    kind: int
    x: float
    y: float
    radius: float
    color: Color


@dataclass(frozen=True, slots=True)
class Picture:
    """``grid`` is (cells high, cells wide)."""

    background: Color
    shapes: tuple[Shape, ...]
    noise: float
    grid: tuple[int, int]

    @property
    def soft_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    def with_grid(self, grid: tuple[int, int]) -> Picture:
        return replace(self, grid=grid)


def jittered(random: Random, color: str) -> Color:
    """Nearly that colour."""
    red, green, blue = (min(255, max(0, level + random.randint(-12, 12))) for level in COLORS[color])
    return red, green, blue


def resized_grid(height: int, width: int) -> tuple[int, int]:
    """The grid of a picture of that many pixels after Gemma 4's resizing, which keeps its aspect."""
    factor = math.sqrt(CELLS_AT_MOST * CELL_PIXELS**2 / (height * width))
    return int(factor * height // CELL_PIXELS), int(factor * width // CELL_PIXELS)


def random_grid(random: Random, *, small: bool) -> tuple[int, int]:
    """Mostly 8 x 8; ``small`` ones are for several pictures in one prompt."""
    draw = random.random()
    if small and draw < 0.5:
        side = random.randint(2, 4)
        return side, side
    if draw < 0.7 or (small and draw < 0.9):
        return 8, 8
    if draw < 0.9:
        while True:
            grid = resized_grid(random.randint(100, 400), random.randint(100, 400))
            if min(grid) >= 4:
                return grid
    side = random.randint(2, 7)
    return side, side


def pack(picture: Picture) -> NDArray[np.float32]:
    """``[34]``: background, noise, grid; for each shape kind + 1 (0: none), x, y, radius, colour."""
    numbers = np.zeros(NUMBERS, np.float32)
    numbers[:3] = np.array(picture.background) / 255
    numbers[3:6] = picture.noise, *picture.grid
    for index, shape in enumerate(picture.shapes):
        color = np.array(shape.color) / 255
        numbers[6 + 7 * index : 13 + 7 * index] = [shape.kind + 1, shape.x, shape.y, shape.radius, *color]
    return numbers


def blank() -> NDArray[np.float32]:
    """A picture of one cell, to fill up a batch."""
    numbers = np.zeros(NUMBERS, np.float32)
    numbers[4:6] = 1
    return numbers


def draw(picture: Picture, size: tuple[int, int] | None = None) -> Image:
    """The picture by PIL, without noise, ``size`` (height, width) pixels large."""
    from PIL import Image, ImageDraw

    height, width = size or (picture.grid[0] * CELL_PIXELS, picture.grid[1] * CELL_PIXELS)
    image = Image.new("RGB", (width, height), picture.background)
    canvas = ImageDraw.Draw(image)
    for shape in picture.shapes:
        x, y, radius = shape.x * width, shape.y * height, shape.radius * min(width, height)
        if shape.kind == 0:
            canvas.ellipse([x - radius, y - radius, x + radius, y + radius], fill=shape.color)
        elif shape.kind == 1:
            side = 0.9 * radius
            canvas.rectangle([x - side, y - side, x + side, y + side], fill=shape.color)
        else:
            base = y + 0.8 * radius
            canvas.polygon([(x, y - radius), (x - radius, base), (x + radius, base)], fill=shape.color)
    return image
