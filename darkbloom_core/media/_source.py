"""Pictures and videos as a request carries them: ``data:`` URIs, read without allocating more than they may hold.

Always true: no address is ever fetched, and no message repeats what the client sent.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote_to_bytes

from darkbloom_core.errors import InvalidRequest

LONGEST_HEAD = 256
"""Characters before the comma of a ``data:`` URI."""

PIECE_CHARACTERS = 1 << 17
"""Of a URI that are decoded at once; a multiple of four, as base64 wants it."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]{0,31}):")
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One picture or video of a request. ``where`` names the field that it came in."""

    kind: Literal["image", "video"]
    uri: str
    where: str

    def fault(self, what: str) -> InvalidRequest:
        """The refusal that names this part."""
        return InvalidRequest(f"{self.where}: {what}", param=self.where)


def read_source(source: MediaSource, bytes_limit: int) -> bytes:
    """The bytes of ``source``. Raises ``InvalidRequest``; a size over the limit is refused before it is decoded."""
    head, data = _split(source)
    media_type, *parameters = head.split(";")
    media_type = media_type.strip().lower()
    if media_type not in ("", "application/octet-stream") and not media_type.startswith(f"{source.kind}/"):
        raise source.fault(f"the data: URI does not say that it is {_article(source.kind)}")
    is_base64 = bool(parameters) and parameters[-1].strip().lower() == "base64"
    size = _base64_size(data) if is_base64 else len(data) - 2 * data.count("%")
    if size > bytes_limit:
        raise source.fault(f"the {source.kind} has {size} bytes, and at most {bytes_limit} are allowed")
    if not data:
        raise source.fault(f"the {source.kind} is empty")
    if not is_base64:
        try:
            return _unquoted(data)
        except ValueError:
            raise source.fault("the data: URI is not valid percent-encoding") from None
    try:
        return _decoded(data)
    except ValueError:  # binascii.Error too; its text could quote the data
        raise source.fault("the data: URI is not valid base64") from None


def _decoded(data: str) -> bytes:
    """Piece by piece, since no other thread runs during a piece: of a large picture all at once would take 20 ms."""
    if "=" in data[:-2]:
        raise ValueError("padding before the end")
    pieces = range(0, len(data), PIECE_CHARACTERS)
    return b"".join(binascii.a2b_base64(data[at : at + PIECE_CHARACTERS], strict_mode=True) for at in pieces)


def _unquoted(data: str) -> bytes:
    """Piece by piece, too: the library takes two hundred bytes for each escape."""
    if not data.isascii():
        raise ValueError("not ASCII")
    pieces, at = [], 0
    while at < len(data):
        end = at + PIECE_CHARACTERS
        escape = data.rfind("%", end - 2, end)  # is not cut in two
        piece = data[at : end if escape < 0 else escape]
        if _PERCENT.search(piece):
            raise ValueError("no escape")
        pieces.append(unquote_to_bytes(piece))
        at += len(piece)
    return b"".join(pieces)


def _split(source: MediaSource) -> tuple[str, str]:
    """What stands before the comma, without ``data:``, and what stands after it."""
    scheme = _SCHEME.match(source.uri)
    if scheme is None or scheme[1].lower() != "data":
        raise source.fault(
            f"{_article(source.kind)} must come as a data: URI; nothing is fetched from elsewhere"
        )
    comma = source.uri.find(",", 0, LONGEST_HEAD)
    if comma < 0:
        raise source.fault("the data: URI has no comma before its data")
    return source.uri[len("data:") : comma], source.uri[comma + 1 :]


def _base64_size(data: str) -> int:
    padding = len(data) - len(data.rstrip("=")) if data.endswith("=") else 0
    return max(0, len(data) // 4 * 3 - min(padding, 2))


def _article(kind: str) -> str:
    return "an image" if kind == "image" else "a video"
