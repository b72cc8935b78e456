"""How a decode step is traced into a graph: fused on an accelerator, unfused on the CPU backend.

There MLX writes C++ for every kernel that it fuses and runs ``g++`` on it, about a second
each. MLX's C++ interface has a mode without fusing (``set_compile_mode`` in
``mlx/compile.h``), its Python one only on and off, so the library's function is called by
its name.

Always true: fusing is on again when the last of the traces at a time has ended; no trace
waits for another; where the function is not to be had, ``can_trace_unfused`` says so and
nothing else changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import threading
from collections.abc import Callable
from functools import cache
from typing import TypeVar, cast

import mlx.core as mx

Traced = TypeVar("Traced")

SET_COMPILE_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"
"""``mlx::core::set_compile_mode(mlx::core::CompileMode)``, as the Itanium C++ ABI writes it."""

NO_FUSE, ENABLED = 2, 3
"""Of ``enum class CompileMode``."""


def is_on_cpu() -> bool:
    """Whether MLX has the CPU backend alone."""
    return not (mx.metal.is_available() or mx.cuda.is_available())


def can_trace_unfused() -> bool:
    """Whether this MLX can compile without fusing, and compiles at all: without ``g++`` it does not on a CPU."""
    compiles = "MLX_DISABLE_COMPILE" not in os.environ and shutil.which("g++") is not None
    return compiles and _set_mode() is not None


def trace_unfused(call: Callable[[], Traced]) -> Traced:
    """What ``call`` gives; what it compiles for the first time is not fused, if ``can_trace_unfused``.

    The mode is the process's: what another thread compiles for the first time just now is
    not fused either, and ``mx.disable_compile`` does not outlive a trace.
    """
    set_mode = _set_mode()
    if set_mode is None:
        return call()
    _under_way.begin(set_mode)
    try:
        return call()
    finally:
        _under_way.end(set_mode)


class _UnderWay:
    """How many traces run just now. The lock is never held while one runs: one that hangs hangs alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def begin(self, set_mode: Callable[[int], object]) -> None:
        with self._lock:
            self._count += 1
            set_mode(NO_FUSE)

    def end(self, set_mode: Callable[[int], object]) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                set_mode(ENABLED)


_under_way = _UnderWay()


@cache
def _set_mode() -> Callable[[int], object] | None:
    with contextlib.suppress(OSError, AttributeError):
        function = getattr(ctypes.CDLL(mx.__file__), SET_COMPILE_MODE)  # of the library that it is linked to
        function.argtypes, function.restype = [ctypes.c_int], None
        return cast("Callable[[int], object]", function)
    return None
