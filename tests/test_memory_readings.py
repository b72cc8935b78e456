"""Readings of the machine: container limits from real files, and what MLX and the system say."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from darkbloom_core.memory import ContainerMemory, MachineReadings, container_memory

GIB = 1024**3
NO_LIMIT_V1 = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def version_2(root: Path, group: str, limit: object, used: int, inactive: int = 0) -> None:
    folder = f"sys/fs/cgroup/{group}".rstrip("/")
    write(
        root,
        {
            f"{folder}/memory.max": limit,
            f"{folder}/memory.current": used,
            f"{folder}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file 7",
        },
    )


def version_1(root: Path, group: str, limit: int, used: int, inactive: int = 0) -> None:
    folder = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    write(
        root,
        {
            f"{folder}/memory.limit_in_bytes": limit,
            f"{folder}/memory.usage_in_bytes": used,
            f"{folder}/memory.stat": f"inactive_file 3\ntotal_inactive_file {inactive}",
        },
    )


def test_a_version_2_limit_is_found_and_droppable_cache_counts_as_free(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/box"})
    version_2(tmp_path, "box", 3 * GIB, 2 * GIB, GIB)
    assert container_memory(tmp_path) == ContainerMemory(limit_bytes=3 * GIB, free_bytes=2 * GIB)


def test_the_tightest_group_of_the_ancestry_counts(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/outer/inner"})
    version_2(tmp_path, "outer", 4 * GIB, 3 * GIB)
    version_2(tmp_path, "outer/inner", 8 * GIB, GIB)
    assert container_memory(tmp_path) == ContainerMemory(limit_bytes=4 * GIB, free_bytes=GIB)


def test_no_limit_is_no_limit(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/box"})
    version_2(tmp_path, "box", "max", GIB)
    assert container_memory(tmp_path) is None


def test_inside_a_container_the_limit_stands_at_the_mount(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/docker/of-the-host"})
    version_2(tmp_path, "", 2 * GIB, GIB)
    assert container_memory(tmp_path) == ContainerMemory(limit_bytes=2 * GIB, free_bytes=GIB)


def test_a_version_1_limit_is_found_beside_other_controllers(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "9:name=systemd:/\n4:memory:/box\n2:cpu,cpuacct:/\n0::/"})
    version_1(tmp_path, "box", 3 * GIB, 2 * GIB, GIB)
    version_1(tmp_path, "", NO_LIMIT_V1, 5 * GIB)
    (tmp_path / "sys/fs/cgroup/unified").mkdir()
    assert container_memory(tmp_path) == ContainerMemory(limit_bytes=3 * GIB, free_bytes=2 * GIB)


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/box"})
    version_2(tmp_path, "box", GIB, 2 * GIB)
    assert container_memory(tmp_path) == ContainerMemory(limit_bytes=GIB, free_bytes=0)


def test_a_system_without_control_groups_has_no_container(tmp_path):
    assert container_memory(tmp_path) is None


def test_a_container_is_the_machine(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/box"})
    version_2(tmp_path, "box", GIB // 2, GIB // 4)
    for pool in ("host", "device"):
        reading = MachineReadings(tmp_path).read(pool)
        assert (reading.physical_bytes, reading.free_bytes) == (GIB // 2, GIB // 4)


def test_without_a_container_the_machine_is_what_the_system_says(tmp_path):
    readings = MachineReadings(tmp_path)
    array = mx.ones((1000, 1000))
    mx.eval(array)
    reading = readings.read("device")
    host = readings.read("host")
    assert host.physical_bytes == psutil.virtual_memory().total
    assert readings.unified is not mx.cuda.is_available()
    assert reading.used_bytes >= array.nbytes
    assert 0 < reading.free_bytes <= reading.physical_bytes


def test_clearing_the_cache_gives_it_back(tmp_path):
    readings = MachineReadings(tmp_path)
    array = mx.ones((1000, 1000))
    mx.eval(array)
    del array
    assert readings.read("device").cached_bytes > 0
    readings.clear_cache()
    assert readings.read("device").cached_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="what other C libraries keep is theirs")
def test_what_the_c_library_keeps_of_freed_memory_goes_back_to_the_system() -> None:
    """Blocks that stay are between those that were freed, so that nothing lies free at the heap's end."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = []
    for _ in range(2000):
        blocks.append(libc.malloc(64 * 1024))
        ctypes.memset(blocks[-1], 1, 64 * 1024)
    for block in blocks[::2]:
        libc.free(block)
    process = psutil.Process()
    before = process.memory_info().rss
    MachineReadings().clear_cache()
    assert before - process.memory_info().rss > 40 * 2**20
    for block in blocks[1::2]:
        libc.free(block)
