"""What the kernels of this room have in common."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import mlx.core as mx

IN_NAMES = str.maketrans(".+-", "___")
"""For a number in a kernel's name: not every release of MLX tells kernels of one name apart by their text."""


@cache
def without_comments(source: str) -> str:
    """MLX hashes the source at each call, so it is short."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


def is_alike(x: mx.array, others: Iterable[mx.array | None]) -> bool:
    """Whether all that are there have the dtype of ``x``: a kernel reads them as one type."""
    return all(each is None or each.dtype == x.dtype for each in others)
