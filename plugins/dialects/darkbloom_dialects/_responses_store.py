"""What is kept of responses, in memory, so that they can be read again and gone on from.

Always true: no more is kept than the options allow, by count and by length; what was used
longest ago goes first. Lengths are those of the JSON, and a conversation counts in each
response that holds it. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from darkbloom_dialects._options import DialectOptions
from darkbloom_dialects._responses_bodies import InputItem


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the items that led to it (``given``) and came of it (``made``), and whose API key asked for it."""

    response: dict[str, Any]
    given: tuple[InputItem, ...]
    made: tuple[InputItem, ...]
    bytes: int
    owner: str | None = None


class ResponseStore:
    """Finished responses by their ids."""

    def __init__(self, options: DialectOptions) -> None:
        self._options = options
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: StoredResponse) -> None:
        """Keep ``stored`` if it fits at all; older ones make room."""
        if stored.bytes > self._options.stored_bytes:
            return
        with self._lock:
            self._kept[stored.response["id"]] = stored
            self.bytes += stored.bytes
            while len(self._kept) > self._options.stored_responses or self.bytes > self._options.stored_bytes:
                _, oldest = self._kept.popitem(last=False)
                self.bytes -= oldest.bytes

    def get(self, name: str, owner: str | None = None) -> StoredResponse | None:
        """The response ``name`` if it is of the API key ``owner``; it counts as used now."""
        with self._lock:
            stored = self._kept.get(name)
            if stored is None or stored.owner != owner:
                return None
            self._kept.move_to_end(name)
            return stored

    def pop(self, name: str) -> StoredResponse | None:
        """Take the response ``name`` out."""
        with self._lock:
            stored = self._kept.pop(name, None)
            self.bytes -= 0 if stored is None else stored.bytes
            return stored
