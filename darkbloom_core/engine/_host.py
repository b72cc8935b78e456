"""Bytes between the host's memory and MLX's arrays, where the device has memory of its own.

On CUDA MLX makes ``mx.array(bytes)`` in managed memory, which the device then faults in page by
page, and asking for an array's memory moves the array itself there: whoever still reads it on the
device reads what is freed. So bytes go up the way files do, and come down from a copy. Elsewhere
host and device share their memory, and neither is needed.
"""

from __future__ import annotations

import io
from typing import Any, cast

import mlx.core as mx
import numpy as np

PIECE_BYTES = 8 * 1024**2
"""Larger bytes go as several files: on an H200 files of 50 MiB took up to three times as long for a byte as
files of 3 to 12. 8 itself was not compared."""


def array_of(data: memoryview) -> mx.array:
    """uint8 ``[len(data)]`` with these bytes, of which there is at least one."""
    if mx.cuda.is_available():
        return loaded(data)
    return mx.array(cast(Any, data))  # MLX takes any buffer; its stub does not say so


def bytes_of(array: mx.array) -> memoryview:
    """The bytes of an evaluated flat array, which stays where it is. From any thread."""
    return memoryview(cast(Any, copied(array) if mx.cuda.is_available() else array)).cast("B")


def loaded(data: memoryview) -> mx.array:
    """uint8 ``[len(data)]`` as MLX loads it from files of ``PIECE_BYTES``, on the calling thread's device."""
    starts = range(0, len(data), PIECE_BYTES)
    pieces = [mx.load(cast(Any, _ArrayFile(data[at : at + PIECE_BYTES])), format="npy") for at in starts]
    return mx.concatenate(cast(list[mx.array], pieces))


def copied(array: mx.array) -> mx.array:
    """The same bits in memory of their own; evaluated. Flat arrays only."""
    copy = mx.concatenate([array, array[:0]])
    mx.eval(copy)
    return copy


class _ArrayFile(io.RawIOBase):
    """``data`` as a file of NumPy's format, which has a header before it; the bytes are copied once, when read."""

    def __init__(self, data: memoryview) -> None:
        header = io.BytesIO()
        described = {"descr": "|u1", "fortran_order": False, "shape": (len(data),)}
        np.lib.format.write_array_header_1_0(header, described)
        self._header, self._data = memoryview(header.getvalue()), data
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        size = len(self._header) + len(self._data)
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """What fits of the header, or of the data behind it."""
        start, piece = (0, self._header) if self._at < len(self._header) else (len(self._header), self._data)
        part = piece[self._at - start :][: len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
