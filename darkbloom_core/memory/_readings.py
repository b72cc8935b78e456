"""Readings of the machine, each a plain function so that policy can be tested without it."""

from __future__ import annotations

import psutil


def physical_memory_bytes() -> int:
    """Memory that this machine has for models."""
    return int(psutil.virtual_memory().total)
