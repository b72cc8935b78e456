"""Paints pictures on the device from the 34 numbers that ``pictures.pack`` makes, patch by patch.

Fast enough to make every training picture anew; ``pictures.draw`` is the other, independent way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.demo.training.pictures import CELL_PIXELS, SHAPES_AT_MOST

PATCH_PIXELS = 16
PATCHES_ACROSS_A_CELL = CELL_PIXELS // PATCH_PIXELS


def patch_positions(pictures: Tensor, patches: int | None = None) -> Tensor:
    """``[N, P, 2]``: column and row of each patch, -1 beyond the picture.

    ``pictures`` is ``[N, 34]``. ``patches`` is how many to make room for; None: as the largest needs.
    """
    rows, columns = (pictures[:, place].long() * PATCHES_ACROSS_A_CELL for place in (4, 5))
    count = patches or int((rows * columns).max())
    index = torch.arange(count, device=pictures.device)[None]
    positions = torch.stack([index % columns[:, None], index // columns[:, None]], -1)
    return torch.where((index < (rows * columns)[:, None])[..., None], positions, -1)


def paint(pictures: Tensor, positions: Tensor) -> Tensor:
    """``[N, P, 768]``: the pixels of every patch, 0 to 1, row by row; zero beyond the picture."""
    count, patches = positions.shape[:2]
    pixel = torch.arange(PATCH_PIXELS**2, device=pictures.device)
    x = positions[..., :1] * PATCH_PIXELS + pixel % PATCH_PIXELS + 0.5
    y = positions[..., 1:] * PATCH_PIXELS + pixel // PATCH_PIXELS + 0.5
    height, width = (pictures[:, place, None, None] * CELL_PIXELS for place in (4, 5))
    side = torch.minimum(height, width)
    colors = pictures[:, None, None, :3].expand(count, patches, PATCH_PIXELS**2, 3).clone()
    for index in range(SHAPES_AT_MOST):
        start = 6 + 7 * index
        kind, center_x, center_y, radius = (pictures[:, start + place, None, None] for place in range(4))
        unit = (radius * side).clamp(min=1e-3)
        dx, dy = (x - center_x * width) / unit, (y - center_y * height) / unit
        circle = dx * dx + dy * dy < 1
        square = torch.maximum(dx.abs(), dy.abs()) < 0.9
        triangle = (dy > -1) & (dy < 0.8) & (dx.abs() < (dy + 1) / 1.8)
        inside = torch.where(kind == 1, circle, torch.where(kind == 2, square, triangle)) & (kind > 0)
        color = pictures[:, None, None, start + 4 : start + 7]
        colors = torch.where(inside[..., None], color, colors)
    noise = torch.randn_like(colors) * pictures[:, 3].view(count, 1, 1, 1)
    is_there = (positions[..., :1] >= 0)[..., None]
    return torch.where(is_there, (colors + noise).clamp(0, 1), 0.0).reshape(count, patches, -1)
