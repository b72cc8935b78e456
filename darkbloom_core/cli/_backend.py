"""Checks, before anything that imports MLX is imported, that MLX can be imported."""

from __future__ import annotations

import importlib

from darkbloom_core.errors import SetupError


def require_backend() -> None:
    """Raise ``SetupError`` that says what to install if MLX has no backend here.

    On Linux the package ``mlx`` alone has none: the library comes with a package of its own.
    """
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        raise SetupError(
            "MLX has no backend on this machine: pip install 'darkbloom[cpu]', or for an NVIDIA GPU "
            f"'darkbloom[cuda13]' or 'darkbloom[cuda12]' ({error})"
        ) from error
