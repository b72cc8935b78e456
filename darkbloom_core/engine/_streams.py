"""The CPU streams of MLX that engines work on, one after the other.

MLX 0.32 starts a thread for every CPU stream and never ends it, and each such thread keeps
memory of its own: with a new stream for every load, a process that loads and unloads models
grows without end. Always true: a stream has one engine at a time, and there are no more
streams than there ever were engines at once.
"""

from __future__ import annotations

import threading

import mlx.core as mx

_lock = threading.Lock()
_free: list[mx.Stream] = []


def take_stream() -> mx.Stream:
    """Make a stream that nobody uses the calling thread's own for what runs on the CPU."""
    with _lock:
        stream = _free.pop() if _free else mx.new_thread_unsafe_stream(mx.cpu)
    mx.set_default_stream(stream)
    return stream


def give_stream(stream: mx.Stream) -> None:
    """Let the next engine have ``stream``. The calling thread has synchronized, and uses it no more."""
    with _lock:
        _free.append(stream)
