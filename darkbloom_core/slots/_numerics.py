"""What of this machine decides the bits that a model computes, besides the model: part of the names of cached blocks."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path

from darkbloom_core.contracts import Device
from darkbloom_core.slots._blas import blas_name

VARIABLES = ("MLX_ENABLE_TF32", "MLX_USE_CUDA_GRAPHS")
"""Of MLX's own environment variables those that choose how something is computed."""


COMPUTATION = "2"
"""Raise it by hand whenever what is computed changes by a bit while no version does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineNumerics:
    """``kernels`` has the versions of what computes, and the choices that were made for it."""

    mlx_version: str
    backend: str
    device: str
    kernels: Mapping[str, str]


def machine_numerics(device: Device) -> MachineNumerics:
    """This machine, with MLX imported."""
    import mlx.core as mx

    kernels = {"core": version("darkbloom-core"), "computation": COMPUTATION}
    kernels |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    blas = blas_name(device)
    if blas is not None:
        kernels["blas"] = blas
    if device.kind == "cuda":
        kernels |= _nvidia_versions()
    if device.kind == "metal":
        kernels["system"] = platform.mac_ver()[0]
    name = _processor() if device.kind == "cpu" else str(mx.device_info()["device_name"])
    return MachineNumerics(
        mlx_version=version("mlx"),
        backend=device.kind,
        device=name,
        kernels=kernels,
    )


def _nvidia_versions() -> dict[str, str]:
    """Versions of the libraries that MLX calls on CUDA, which come as packages of their own."""
    named = ((str(one.metadata["Name"]).lower(), one.version) for one in distributions())
    return {name: found for name, found in named if name.startswith("nvidia-")}


def _processor() -> str:
    """The processor: a BLAS chooses its kernels by it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {models[0] if models else platform.processor()}"
