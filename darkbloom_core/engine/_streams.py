"""The streams of MLX that engines work on; those of the CPU one after the other.

MLX 0.32 starts a thread for every CPU stream and never ends it, and each such thread keeps
memory of its own: with a new stream for every load, a process that loads and unloads models
grows without end. Always true: a stream has one engine at a time, and there are no more
streams than there ever were engines at once, but for those whose end failed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import mlx.core as mx

_lock = threading.Lock()
_free: list[mx.Stream] = []


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """A stream that nobody else uses is the calling thread's for what runs on the CPU.

    The accelerator's is a new one: what the thread had went with its last engine. At its end
    the block has synchronized. If it raises, nobody knows what still runs, and the CPU's
    stream is not used again.
    """
    with _lock:
        stream = _free.pop() if _free else mx.new_thread_unsafe_stream(mx.cpu)
    mx.set_default_stream(stream)
    device = mx.default_device()
    if device.type != mx.cpu:
        mx.set_default_stream(mx.new_stream(device))
    yield
    with _lock:
        _free.append(stream)
