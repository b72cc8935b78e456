"""One part in one file, encrypted: the bytes of format 1, as docs/ssd_format.md lists them.

Always true: what ``read_part`` says it read is what was written under this name and this
key, whole; no plaintext of a part and nothing that names it is in the file's bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from darkbloom_ssd_tier._keys import Keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"dbloomKV"
VERSION = 1
SUFFIX = f".v{VERSION}"
SEGMENT_BYTES = 256 * 1024
TAG_BYTES = 16
HEADER_BYTES = 128
MOST_PLAIN_BYTES = 1 << 32
"""No part is that large; a header that says so is damaged."""

_FIXED = struct.Struct("<8sHHIQ8s32s")
_NONCE = struct.Struct("<QI")
_WRAP_NONCE_BYTES = 12
_DATA_KEY_BYTES = 32
_WRAPPED_BYTES = _DATA_KEY_BYTES + TAG_BYTES

Read = Callable[[memoryview], int | None]
"""Read on into the view; gives how many bytes came, 0 at the end."""


class Damaged(Exception):
    """The file is not what was written under this name and this key."""


class Stopped(Exception):
    """Whoever asked wants the bytes no more."""


def file_bytes(plain_bytes: int) -> int:
    """Length of the file of a part of ``plain_bytes``."""
    return HEADER_BYTES + plain_bytes + TAG_BYTES * -(-plain_bytes // SEGMENT_BYTES)


def plain_bytes(size_bytes: int) -> int | None:
    """Length of the part in a file of ``size_bytes``; None if no part's file has that length."""
    body = size_bytes - HEADER_BYTES
    plain = body - TAG_BYTES * -(-body // (SEGMENT_BYTES + TAG_BYTES))
    return plain if plain > 0 and file_bytes(plain) == size_bytes else None


def encrypt_part(
    keys: Keys, name: bytes, data: memoryview, random: Callable[[int], bytes] = os.urandom
) -> Iterator[memoryview]:
    """The file's bytes in pieces; each is valid until the next is asked for.

    ``name`` is the part's keyed name of 32 bytes.
    """
    data_key, wrap_nonce = random(_DATA_KEY_BYTES), random(_WRAP_NONCE_BYTES)
    fixed = _FIXED.pack(MAGIC, VERSION, 0, SEGMENT_BYTES, len(data), keys.key_id, name)
    wrapped = _aead(keys.wrap_key).encrypt(wrap_nonce, data_key, fixed)
    header = (fixed + wrap_nonce + wrapped).ljust(HEADER_BYTES, b"\0")
    yield memoryview(header)
    cipher = _aead(data_key)
    scratch = memoryview(bytearray(SEGMENT_BYTES + TAG_BYTES))
    for number, start, length in _segments(len(data)):
        sealed = scratch[: length + TAG_BYTES]
        nonce = _nonce(number, start + length == len(data))
        cipher.encrypt_into(nonce, data[start : start + length], header, sealed)
        yield sealed


def read_part(
    keys: Keys, name: bytes, read: Read, buffer: memoryview, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Decrypt a file straight into ``buffer``, which is as long as the part.

    Raises ``Damaged`` (the buffer's content is garbage then), ``Stopped``, and what ``read`` raises.
    """
    scratch = memoryview(bytearray(HEADER_BYTES + SEGMENT_BYTES + TAG_BYTES))
    segments = list(_segments(len(buffer)))
    first = HEADER_BYTES + segments[0][2] + TAG_BYTES
    _fill(read, scratch[:first])
    header = bytes(scratch[:HEADER_BYTES])
    cipher = _aead(_open_header(keys, name, header, len(buffer)))
    for number, start, length in segments:
        if is_stopped():
            raise Stopped
        sealed = scratch[HEADER_BYTES : HEADER_BYTES + length + TAG_BYTES]
        if number:
            _fill(read, sealed)
        nonce = _nonce(number, start + length == len(buffer))
        _decrypt(cipher, nonce, sealed, header, buffer[start : start + length])
    if read(scratch[:1]):
        raise Damaged("bytes after the end")


def header_of(read: Read) -> tuple[bytes, bytes, int]:
    """Key id, name and part's length as the header says, unproven. Raises ``Damaged`` if it is none."""
    header = memoryview(bytearray(HEADER_BYTES))
    _fill(read, header)
    magic, version, flags, segment, length, key_id, name = _FIXED.unpack_from(header)
    if (magic, version, flags, segment) != (
        MAGIC,
        VERSION,
        0,
        SEGMENT_BYTES,
    ) or not 0 < length < MOST_PLAIN_BYTES:
        raise Damaged("no header of format 1")
    return key_id, name, length


def _open_header(keys: Keys, name: bytes, header: bytes, length: int) -> bytes:
    """The data key. Every byte of the header counts: the fixed ones here, all of them in each segment."""
    fixed = _FIXED.pack(MAGIC, VERSION, 0, SEGMENT_BYTES, length, keys.key_id, name)
    if header[: _FIXED.size] != fixed:
        raise Damaged("the header is another part's")
    start = _FIXED.size + _WRAP_NONCE_BYTES
    nonce, wrapped = header[_FIXED.size : start], header[start : start + _WRAPPED_BYTES]
    data_key = bytearray(_DATA_KEY_BYTES)
    _decrypt(_aead(keys.wrap_key), nonce, memoryview(wrapped), fixed, memoryview(data_key))
    return bytes(data_key)


def _decrypt(cipher: AESGCM, nonce: bytes, sealed: memoryview, known: bytes, into: memoryview) -> None:
    from cryptography.exceptions import InvalidTag

    try:
        cipher.decrypt_into(nonce, sealed, known, into)
    except InvalidTag:
        raise Damaged("it does not authenticate") from None


def _segments(length: int) -> Iterator[tuple[int, int, int]]:
    """(number, first byte, bytes) of each segment of a part."""
    for number, start in enumerate(range(0, length, SEGMENT_BYTES)):
        yield number, start, min(SEGMENT_BYTES, length - start)


def _nonce(number: int, is_last: bool) -> bytes:
    """Never twice under one data key; the last segment's tells that it is the last."""
    return _NONCE.pack(number, int(is_last))


def _fill(read: Read, view: memoryview) -> None:
    while view:
        came = read(view)
        if not came:
            raise Damaged("the file is cut short")
        view = view[came:]


def _aead(key: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
