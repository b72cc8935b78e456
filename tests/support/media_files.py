"""Makes picture and video files for tests, and a seam that sees them without any model."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import zlib
from fractions import Fraction

import av
import numpy as np
from PIL import Image

from darkbloom_core.contracts import PreparedPicture
from darkbloom_core.errors import InvalidRequest

CELL = 16


class CellSeam:
    """A seam whose soft tokens are cells of 16 x 16 pixels; it resizes nothing and keeps every pixel."""

    tower_layers = 1
    most_soft_tokens = 4096
    most_frames = 32
    soft_token_bytes = CELL * CELL * 3

    def soft_tokens(self, height, width, *, video):
        if height < CELL or width < CELL:
            raise InvalidRequest("the picture is smaller than a cell")
        return (height // CELL) * (width // CELL)

    def prepare(self, pixels, *, video):
        height, width = pixels.shape[:2]
        return PreparedPicture(
            self.soft_tokens(height, width, video=video),
            {"pixels": pixels},
            hashlib.sha256(pixels.tobytes()).digest(),
        )


def data_uri(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def picture_file(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    """``image`` as a file of the ``kind`` that Pillow calls so."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def flat_png(width: int, height: int) -> bytes:
    """A black PNG of one bit a pixel, of any size, without ever holding its pixels."""
    row = b"\0" * (1 + -(-width // 8))
    packer, parts = zlib.compressobj(9), []
    for _ in range(height):
        parts.append(packer.compress(row))
    parts.append(packer.flush())
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", b"".join(parts)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def long_gif(frames: int, side: int = 16) -> bytes:
    """A GIF of ``frames`` frames of one colour."""
    blocks = b"\x02" + b"\x02\x4c\x01" + b"\x00"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + blocks
    head = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return head + frame * frames + b";"


def wide_webp(width: int, height: int) -> bytes:
    """The header of a lossless WebP of this size, and next to nothing after it."""
    bits = (width - 1) | (height - 1) << 14
    return _riff((b"VP8L", b"\x2f" + struct.pack("<I", bits) + b"\0" * 16))


def long_webp(frames: int) -> bytes:
    """An animated WebP that has ``frames`` frames of 1 x 1 and no picture in any of them."""
    canvas = struct.pack("<B3x", 2) + bytes(6)
    return _riff((b"VP8X", canvas), (b"ANIM", bytes(6)), *[(b"ANMF", bytes(16))] * frames)


def _riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(name + struct.pack("<I", len(content)) + content for name, content in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def large_frame_video(width: int, height: int) -> bytes:
    """An MP4 of one black H.264 frame of this size."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=Fraction(10))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "ultrafast", "bf": "0", "threads": "1"}
        frame = av.VideoFrame(width, height, "yuv420p")
        for plane in frame.planes:
            np.frombuffer(plane, np.uint8)[:] = 128
        for packet in (*stream.encode(frame), *stream.encode()):
            file.mux(packet)
    return out.getvalue()


def with_small_frames(data: bytes) -> bytes:
    """``data``, an MP4 in H.264, whose headers say 64 x 48: its stream alone knows better."""
    at = data.index(b"avc1", data.index(b"stsd")) + 4 + 24
    return data[:at] + struct.pack(">HH", 64, 48) + data[at + 4 :]


def video_file(
    frames, *, container="mp4", codec="libx264", rate=10, gop=12, options=None, rotation=None
) -> bytes:
    """A video of ``frames``, arrays ``[height, width, 3]``, at ``rate`` frames a second."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=Fraction(rate))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = {"mjpeg": "yuvj420p", "prores_ks": "yuv422p10le"}.get(codec, "yuv420p")
        stream.gop_size = gop
        stream.options = {"qmax": "1", "qmin": "1"} if codec == "mjpeg" else {"crf": "12"}
        if options:
            stream.options = options
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return out.getvalue()


def numbered_frames(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Frame number ``n`` is grey, 6 n + 10 bright."""
    return [np.full((height, width, 3), 6 * number + 10, np.uint8) for number in range(count)]


def number_of(frame: np.ndarray) -> int:
    """Which of ``numbered_frames`` it was."""
    return round((float(frame.mean()) - 10) / 6)
