"""What a benchmark ran on, in one line: numbers mean nothing without it."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from darkbloom_core.contracts import Device


@dataclass(frozen=True, slots=True)
class Machine:
    """``blas`` is None where matrix products do not go through one."""

    processor: str
    cores: int
    system: str
    mlx_version: str
    backend: str
    blas: str | None

    def __str__(self) -> str:
        blas = f", BLAS: {self.blas}" if self.blas else ""
        return (
            f"{self.processor}, {self.cores} cores, {self.system}, "
            f"MLX {self.mlx_version} on {self.backend}{blas}"
        )


def this_machine(device: Device) -> Machine:
    """This machine, with MLX imported."""
    import mlx.core as mx

    backend = device.kind if device.kind == "cpu" else f"{device.kind} ({mx.device_info()['device_name']})"
    on_linux_cpu = device.kind == "cpu" and platform.system() == "Linux"
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        mlx_version=version("mlx"),
        backend=backend,
        blas=blas_of(_preloaded_blas()) if on_linux_cpu else None,
    )


def blas_of(file: str | None) -> str:
    """Which BLAS the library in ``file`` is; None: no preloaded one, so the one that MLX's wheel brings answers."""
    if file is None:
        return "the wheel's own (netlib reference)"
    name = Path(file).name
    known = next((known for known in ("OpenBLAS", "MKL", "BLIS") if known.lower() in name.lower()), name)
    return f"{known}, preloaded"


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


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        brand = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        )
        return brand.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()
