"""Pictures that the model has seen, by digest: the next request with the same one spares the tower.

Always true: what is kept is reserved in the model's share and bounded; it gives way to any
live request; whoever uses a picture holds it, so that dropping it here takes nothing away.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import mlx.core as mx

from darkbloom_core.memory import Share

MOST_PICTURES = 4096
"""How many pictures are kept, however small they are: each is an array, of which Metal allows so many."""

PICTURES = "pictures"
"""The key of the reservation in the model's share; requests have other ids."""


class PictureCache:
    """Thread-safe. The one that was used the longest ago goes first."""

    def __init__(self, share: Share, most_bytes: int) -> None:
        self._share = share
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, mx.array] = OrderedDict()
        self._bytes_used = 0

    @property
    def bytes_used(self) -> int:
        return self._bytes_used

    @property
    def count(self) -> int:
        """How many pictures are kept."""
        return len(self._kept)

    def get(self, digest: bytes) -> mx.array | None:
        """``[soft_tokens, H]``, or None."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def put(self, digest: bytes, soft_tokens: mx.array) -> None:
        """Keep ``soft_tokens``, which are evaluated, if there is room; older ones make some."""
        with self._lock:
            if digest in self._kept or soft_tokens.nbytes > self._most_bytes:
                return
            self._shrink(self._most_bytes - soft_tokens.nbytes)
            while len(self._kept) >= MOST_PICTURES:
                self._drop_oldest()
            while not self._share.hold(PICTURES, self._bytes_used + soft_tokens.nbytes):
                if not self._kept:
                    return
                self._drop_oldest()
            self._kept[digest] = soft_tokens
            self._bytes_used += soft_tokens.nbytes

    def trim(self, size_bytes: int) -> int:
        """Drop pictures of so many bytes, as far as there are any; gives the bytes that are free now."""
        with self._lock:
            before = self._bytes_used
            self._shrink(max(0, before - size_bytes))
            return before - self._bytes_used

    def fit(self) -> None:
        """Shrink to what the share leaves beside the others' reservations."""
        self.trim(max(0, self._share.reserved_bytes - self._share.limit_bytes))

    def close(self) -> None:
        """Keep nothing any more. Idempotent."""
        with self._lock:
            self._most_bytes = -1
            self._shrink(0)

    def _shrink(self, size_bytes: int) -> None:
        while self._bytes_used > size_bytes:
            self._drop_oldest()
        self._share.hold(PICTURES, self._bytes_used)

    def _drop_oldest(self) -> None:
        _, gone = self._kept.popitem(last=False)
        self._bytes_used -= gone.nbytes
