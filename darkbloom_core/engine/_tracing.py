"""How a decode step is traced into a graph: fused on an accelerator, unfused on the CPU backend.

There MLX writes C++ for every kernel that it fuses and runs ``g++`` on it, about a second
each, and replaying the operations one by one saves as much of the host's time. MLX's C++
interface has a mode for that (``set_compile_mode`` in ``mlx/compile.h``), its Python one
only on and off, so the library's function is called by its name.

Always true: the mode is as it was when a trace ends; where the function is not to be had,
``can_trace_unfused`` says so and nothing else changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

Traced = TypeVar("Traced")

SET_COMPILE_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"
"""``mlx::core::set_compile_mode(mlx::core::CompileMode)``, as the Itanium C++ ABI writes it."""

NO_FUSE, ENABLED = 2, 3
"""Of ``enum class CompileMode``."""

_lock = threading.Lock()


def is_on_cpu() -> bool:
    """Whether MLX has the CPU backend alone."""
    return not (mx.metal.is_available() or mx.cuda.is_available())


def can_trace_unfused() -> bool:
    """Whether this MLX can compile without fusing, and is to compile at all."""
    return _set_mode() is not None and "MLX_DISABLE_COMPILE" not in os.environ


def trace_unfused(call: Callable[[], Traced]) -> Traced:
    """What ``call`` gives; what it compiles for the first time is not fused, if ``can_trace_unfused``.

    The mode is the process's: what another thread compiles for the first time just now is
    not fused either, which costs a little speed and changes nothing else.
    """
    set_mode = _set_mode()
    if set_mode is None:
        return call()
    with _lock:
        set_mode(NO_FUSE)
        try:
            return call()
        finally:
            set_mode(ENABLED)


@cache
def _set_mode() -> Callable[[int], object] | None:
    for library in _libraries():
        with contextlib.suppress(OSError, AttributeError):
            function = getattr(ctypes.CDLL(str(library)), SET_COMPILE_MODE)
            function.argtypes, function.restype = [ctypes.c_int], None
            return function  # type: ignore[no-any-return]  # ctypes has no types here
    return None


def _libraries() -> list[Path]:
    folder = Path(mx.__file__).parent / "lib"
    return [folder / "libmlx.so", folder / "libmlx.dylib"]
