"""Readings of the machine: what it has, what MLX holds, what is left. Policy takes them as values.

Always true: a reading is of one moment and of one pool. On unified memory, and on the CPU,
device and host are the same pool.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import psutil

from darkbloom_core.memory._container import container_memory

Pool = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One pool. ``used_bytes`` is what MLX holds there, ``cached_bytes`` the part that it could give back.

    ``free_bytes`` is what the system says is left for anybody; None if it says nothing.
    """

    physical_bytes: int
    used_bytes: int
    cached_bytes: int
    free_bytes: int | None


class Readings(Protocol):
    """What memory management asks the machine. Thread-safe."""

    @property
    def unified(self) -> bool:
        """Whether device and host are one pool."""
        ...

    def read(self, pool: Pool) -> Reading: ...

    def clear_cache(self) -> None:
        """Let MLX and the C library give back what they only keep for later."""
        ...


class MachineReadings:
    """This machine. ``root`` is where container limits are looked for."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    @property
    def unified(self) -> bool:
        import mlx.core as mx

        return not mx.cuda.is_available()

    def read(self, pool: Pool) -> Reading:
        if pool == "host":
            return self._host(0, 0)
        import mlx.core as mx

        cached = mx.get_cache_memory()
        used = mx.get_active_memory() + cached
        if self.unified:
            return self._host(used, cached)
        facts = mx.device_info()
        return Reading(int(facts["total_memory"]), used, cached, int(facts["free_memory"]))

    def clear_cache(self) -> None:
        clear_caches()

    def _host(self, used_bytes: int, cached_bytes: int) -> Reading:
        machine = psutil.virtual_memory()
        container = container_memory(self._root)
        physical, free = int(machine.total), int(machine.available)
        if container is not None:
            physical, free = min(physical, container.limit_bytes), min(free, container.free_bytes)
        return Reading(physical, used_bytes, cached_bytes, free)


class FixedReadings:
    """Readings that somebody else decides: what tests and what-if plans use. ``on_clear`` empties the cache."""

    def __init__(
        self,
        physical_bytes: int,
        used_bytes: int = 0,
        free_bytes: int | None = None,
        cached_bytes: int = 0,
        *,
        unified: bool = True,
        on_clear: Callable[[], None] = lambda: None,
    ) -> None:
        self.physical_bytes = physical_bytes
        self.used_bytes = used_bytes
        self.free_bytes = free_bytes
        self.cached_bytes = cached_bytes
        self._unified = unified
        self._on_clear = on_clear

    @property
    def unified(self) -> bool:
        return self._unified

    def read(self, pool: Pool) -> Reading:
        return Reading(self.physical_bytes, self.used_bytes, self.cached_bytes, self.free_bytes)

    def clear_cache(self) -> None:
        self.used_bytes -= self.cached_bytes
        self.cached_bytes = 0
        self._on_clear()


def clear_caches() -> None:
    """Give back to the system what was freed and is only kept for later: MLX's buffers, and pages of the C library.

    glibc gives back by itself only what lies at the end of a heap; after a model was unloaded
    that leaves tens of MiB (``malloc_trim(3)``). Other C libraries are left alone.
    """
    import mlx.core as mx

    mx.clear_cache()
    if sys.platform == "linux" and hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def physical_memory_bytes() -> int:
    """Memory that this machine, or its container, has for models on the host's side."""
    return MachineReadings().read("host").physical_bytes
