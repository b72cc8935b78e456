"""What the first bytes of a file say, read by hand where a library would decode or follow references first.

Always true: nothing here allocates more than the file itself, or loops longer than the file is.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Literal, TypeAlias

Format: TypeAlias = Literal["PNG", "JPEG", "WEBP", "GIF", "HEIF", "MP4", "WEBM"]

_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_MP4_TABLES = re.compile(rb"stsz|stz2|trun|elst|stsc|stco|co64|cmov")
_AUDIO_RUN = 1024
"""How many samples of plain audio a library takes as one."""

_WEBM_HOLDERS = (b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75", b"\xa0", b"\x75\xa1", b"\xa6")
"""Segment, Cluster, BlockGroup, BlockAdditions, BlockMore: what is in them is looked at."""

_WEBM_FRAMES = (b"\xa1", b"\xa3", b"\xa5", b"\xec")
"""Block, SimpleBlock, BlockAdditional, and Void."""


def sniff(data: bytes) -> Format | None:
    """The format of ``data`` by its signature; MOV counts as MP4, Matroska as WebM. None for any other."""
    box = data[4:8]
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if box == b"ftyp" and data[8:12] in _HEIF_BRANDS:
        return "HEIF"
    if box in _MP4_BOXES:
        return "MP4"
    return "WEBM" if data.startswith(b"\x1a\x45\xdf\xa3") else None


def parts_apart(data: bytes, most: int) -> int:
    """How many segments of a JPEG or chunks of a PNG stand beside its pixels, counted up to ``most + 1``; 0 for others.

    Libraries keep each of them, and an empty one takes 4 bytes of a file and a hundred of memory. From ITU-T T.81,
    annex B, and the PNG specification, section 5.
    """
    count, place, is_png = 0, 2, data.startswith(b"\x89PNG")
    if is_png:
        place = 8
        while place + 8 <= len(data) and count <= most:
            count += data[place + 4 : place + 8] not in (b"IDAT", b"fdAT")
            place += 12 + int.from_bytes(data[place : place + 4], "big")
    elif data.startswith(b"\xff\xd8"):
        while 0 <= (place := data.find(b"\xff", place)) < len(data) - 3 and count <= most:
            marker = data[place + 1]
            if marker == 0xDA:  # pixels
                break
            alone = marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD9
            count += not alone
            place += 1 if alone else 2 + max(2, int.from_bytes(data[place + 2 : place + 4], "big"))
    return count


def webp_size(data: bytes) -> tuple[int, int]:
    """(width, height) of the canvas; a WebP library allocates it when it opens the file.

    From Google's "WebP Container Specification" and RFC 6386, section 9.1. Raises ``ValueError``.
    """
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise ValueError("the file ends in its header")
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", body[6:10])
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError("the first chunk is not a picture")


def webp_frames(data: bytes) -> int:
    """How many frames an animated WebP holds; 1 for any other.

    From Google's "WebP Container Specification". A file that breaks off counts for what is there.
    """
    frames, place = 0, 12
    while place + 8 <= len(data):
        frames += data[place : place + 4] == b"ANMF"
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8 + size + size % 2
    return max(1, frames)


def gif_frames(data: bytes, most: int) -> int:
    """How many pictures a GIF holds, counted up to ``most + 1`` without decoding any.

    From "Graphics Interchange Format, Version 89a". A file that breaks off counts for what is there.
    """
    frames, place = 0, 13 + _colour_table(data, 10)
    while place < len(data) and frames <= most:
        kind = data[place]
        if kind == 0x21:  # an extension: its label, then blocks
            place = _after_blocks(data, place + 2)
        elif kind == 0x2C:  # a picture: its place, perhaps colours, a code size, then blocks
            frames += 1
            place = _after_blocks(data, place + 11 + _colour_table(data, place + 9))
        else:
            break
    return frames


def mp4_durations(data: bytes) -> tuple[float | None, list[float]]:
    """Seconds that an MP4 or MOV claims to last: the whole film, and each track; None or absent where it says nothing.

    From ISO/IEC 14496-12, sections 8.2.2 (mvhd) and 8.4.2 (mdhd).
    """
    whole, tracks = None, []
    for name, start, end in _boxes(data, 0, len(data)):
        if name == b"moov":
            for inner, begin, stop in _boxes(data, start, end):
                if inner == b"mvhd":
                    whole = _header_seconds(data[begin:stop])
                elif inner == b"trak":
                    media = [box for box in _boxes(data, begin, stop) if box[0] == b"mdia"]
                    heads = [box for _, a, b in media for box in _boxes(data, a, b) if box[0] == b"mdhd"]
                    tracks += [_header_seconds(data[a:b]) for _, a, b in heads]
    return whole, [seconds for seconds in tracks if seconds is not None]


def mp4_entries(data: bytes, most: int) -> int | None:
    """How many entries a library would hold of an MP4's or MOV's tables, at least; None for tables that are compressed.

    A table need not take any room in the file for its entries, and edits repeat them. From ISO/IEC
    14496-12, section 8. Tables are found by name wherever frames (mdat) are not, as libraries look
    for them in any box. Beyond ``most`` it need not be exact.
    """
    counts = {name: [0] for name in (b"sizes", b"elst", b"stsc", b"chunks")}
    kinds = {b"elst": b"elst", b"stco": b"chunks", b"co64": b"chunks"}
    left = most
    for box, start, end in _boxes(data, 0, len(data)):
        for table in () if box == b"mdat" else _MP4_TABLES.finditer(data, start, end):
            name, at = table[0], table.end()
            if name == b"cmov":
                return None
            count_at = at + (8 if name in (b"stsz", b"stz2") else 4)
            count = int.from_bytes(data[count_at : count_at + 4], "big")
            if name == b"stsc":
                runs = data[at + 8 : at + 8 + 12 * min(count, left + 1)]
                counts[name] += [int.from_bytes(runs[n + 4 : n + 8], "big") for n in range(0, len(runs), 12)]
                left -= len(runs) // 12
            else:
                counts[kinds.get(name, b"sizes")].append(count)
            left -= 1
            if left < 0:
                return most + 1
    audio = max(counts[b"chunks"]) * -(-max(counts[b"stsc"]) // _AUDIO_RUN)
    return (sum(counts[b"sizes"]) + audio) * max(1, *counts[b"elst"])


def webm_described_bytes(data: bytes) -> int:
    """How many bytes of a WebM or Matroska are not frames; what cannot be told counts as such.

    A library keeps an element of two bytes in a hundred. From RFC 8794 and RFC 9559.
    """
    total = place = 0
    while place < len(data):
        name_end = place + 9 - data[place].bit_length()
        size_bytes = 9 - data[name_end].bit_length() if name_end < len(data) else 9
        begin = name_end + size_bytes
        name = data[place:name_end]
        size = int.from_bytes(data[name_end:begin], "big") & ~(-1 << 7 * size_bytes)
        if size_bytes > 8 or (name not in _WEBM_HOLDERS and begin + size > len(data)):
            return total + len(data) - place
        is_frame = name in _WEBM_FRAMES
        place, length = begin + (0 if name in _WEBM_HOLDERS else size), begin - place
        total += length + (0 if is_frame or name in _WEBM_HOLDERS else size)
    return total


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of the content of each box from ``start`` to ``end``, as far as they make sense."""
    while start + 8 <= end:
        size, name, head = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[start + 8 : start + 16], "big"), 16
        stop = min(end, start + size) if size else end
        if stop < start + head:
            return
        yield name, start + head, stop
        start = stop


def _header_seconds(body: bytes) -> float | None:
    """The duration of an mvhd or mdhd; None if it is left open."""
    wide = body[:1] == b"\x01"
    scale, units = (body[20:24], body[24:32]) if wide else (body[12:16], body[16:20])
    if len(units) < (8 if wide else 4) or not any(scale) or not any(units) or units.count(255) == len(units):
        return None
    return int.from_bytes(units, "big") / int.from_bytes(scale, "big")


def _colour_table(data: bytes, flags_at: int) -> int:
    flags = data[flags_at] if flags_at < len(data) else 0
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(data: bytes, place: int) -> int:
    while place < len(data) and data[place]:
        place += 1 + data[place]
    return place + 1
