"""Which backend MLX has on this machine."""

from __future__ import annotations

from darkbloom_core.contracts import Device
from darkbloom_core.errors import SetupError


def current_device() -> Device:
    """The device that models run on: Metal, else CUDA, else the CPU.

    Raises ``SetupError`` that says what to install if MLX has no backend here.
    """
    try:
        import mlx.core as mx
    except ImportError as error:
        raise SetupError(
            "MLX has no backend on this machine: on Linux install darkbloom-core[cpu], "
            f"darkbloom-core[cuda12] or darkbloom-core[cuda13] ({error})"
        ) from error
    if mx.metal.is_available():
        return Device("metal")
    if not mx.cuda.is_available():
        return Device("cpu")
    return Device("cuda")
