"""Which BLAS computes MLX's matrix products on a Linux CPU: the wheel brings the slow reference one."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from darkbloom_core.contracts import Device

KNOWN = ("OpenBLAS", "MKL", "BLIS")

REFERENCE_BLAS = "the wheel's own (netlib reference)"


def blas_name(device: Device) -> str | None:
    """The BLAS that answers in this process; None where matrix products do not go through one that can be chosen."""
    on_linux_cpu = device.kind == "cpu" and platform.system() == "Linux"
    return blas_of(_preloaded_blas()) if on_linux_cpu else None


def blas_of(file: str | None) -> str:
    """Which BLAS the library in ``file`` is; None: no preloaded one, so the one that MLX's wheel brings answers."""
    if file is None:
        return REFERENCE_BLAS
    name = Path(file).name
    return f"{next((known for known in KNOWN if known.lower() in name.lower()), name)}, preloaded"


def _preloaded_blas() -> str | None:
    """The file whose ``cblas_sgemm`` comes before that of MLX's own library; None if there is none.

    What is preloaded is in the process's global scope; what a wheel brings is not.
    """
    try:
        function = ctypes.CDLL(None).cblas_sgemm
    except AttributeError:
        return None
    found = _SymbolInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(found))
    return None if found.file is None else os.fsdecode(found.file)


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )
