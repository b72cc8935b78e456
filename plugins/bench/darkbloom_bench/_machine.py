"""What a benchmark ran on, in one line: numbers mean nothing without it."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from darkbloom_core.contracts import Device
from darkbloom_core.slots import blas_name


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
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        mlx_version=version("mlx"),
        backend=backend,
        blas=blas_name(device),
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
