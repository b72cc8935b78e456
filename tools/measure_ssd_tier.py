"""How fast the cache on disk gives a prompt's parts, next to what the disk gives to `dd` and to plain reads.

Blocks have the sizes of real models: their layers come from a shape's config.json. Parts
are written by the tier itself; before each read the page cache is dropped, for all alike.
The tier reads into reused buffers, into new ones as in the engine, and into new ones filled
with zeros.
The order of the readers changes from round to round; medians are compared.

    uv run python tools/measure_ssd_tier.py --folder /on/the/disk --tokens 8192
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import darkbloom_bench
from darkbloom_ssd_tier._store import Stores
from darkbloom_ssd_tier._tier import SsdTier, SsdTierFactory

from darkbloom_core.contracts import Device, Fetch, PartKey, TierContext
from darkbloom_core.plugins import load_plugins
from darkbloom_core.prefix import PART_NAMES, PartLayout
from darkbloom_core.prefix._stack import new_buffer
from darkbloom_core.telemetry import SinkEmitter

SHAPES = Path(darkbloom_bench.__file__).parent / "shapes"
GRID_TOKENS = 256
PIECE_BYTES = 1024**2
MEBIBYTE = 1024**2


def parts_of(shape: str, tokens: int) -> list[tuple[PartKey, int]]:
    """What a reuse of ``tokens`` tokens of this model needs: keys and bytes."""
    config = json.loads((SHAPES / f"{shape}.json").read_text())
    description = load_plugins().family_for(config).describe(config, Device("cpu"))
    layout = PartLayout(description.layers, GRID_TOKENS).of(range(GRID_TOKENS, tokens + 1, GRID_TOKENS))
    wanted = [(block, PART_NAMES[0]) for block in range(layout.count(tokens)) if layout.needs_full(block)]
    wanted += layout.needs_at(tokens)
    return [
        (PartKey(hashlib.sha256(f"{block}".encode()).digest(), part), layout.part_bytes(block, part))
        for block, part in wanted
    ]


def drop_caches(files: Sequence[Path]) -> None:
    """Let none of these files be in the page cache."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_plainly(files: Sequence[Path], threads: int) -> None:
    """Read all files with so many threads, in pieces, and throw the bytes away."""

    def read(mine: Sequence[Path]) -> None:
        piece = memoryview(bytearray(PIECE_BYTES))
        for file in mine:
            with file.open("rb", buffering=0) as raw:
                while raw.readinto(piece):
                    pass

    workers = [threading.Thread(target=read, args=(files[first::threads],)) for first in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def dd(files: Sequence[Path], *flags: str) -> None:
    """Read all files one after the other with dd, by one process for all of them."""
    command = "".join(f"dd if='{file}' of=/dev/null bs=4M {' '.join(flags)} status=none;" for file in files)
    subprocess.run(["sh", "-c", command], check=True)


def open_tier(folder: Path, readers: int) -> SsdTier:
    """A tier of its own with room for everything."""
    options = {
        "key_store": "file",
        "key_file": str(folder / "key"),
        "free_bytes_floor": 0,
        "first_sight_share": 1.0,
        "write_bytes_per_day": 1 << 50,
        "write_bytes_per_second": 1 << 50,
        "readers": readers,
    }
    context = TierContext(
        model="measured",
        directory=folder / "cache",
        bytes_limit=1 << 50,
        options=options,
        reserve=lambda _: True,
        emitter=SinkEmitter(),
    )
    return SsdTierFactory(Stores()).open(context)


def write(tier: SsdTier, parts: Sequence[tuple[PartKey, int]]) -> float:
    """Write all parts; gives the seconds."""
    content = memoryview(os.urandom(max(size for _, size in parts)))
    began = time.monotonic()
    for key, size in parts:
        while not tier.offer(key, content[:size]):
            time.sleep(0.001)  # the queue is full
    if not tier.settle(600):
        raise RuntimeError("the parts were not written")
    return time.monotonic() - began


def measure(shape: str, folder: Path, tokens: int, rounds: int, readers: int) -> dict[str, float]:
    """Mebibytes per second of each reader, the median of ``rounds``."""
    tier = open_tier(folder, readers)
    tier.settle()
    parts = parts_of(shape, tokens)
    total = sum(size for _, size in parts)
    seconds = write(tier, parts)
    files = sorted((folder / "cache").glob("*/*.v1"))
    buffers = [memoryview(bytearray(size)) for _, size in parts]

    def fetch(buffers: Iterable[memoryview]) -> None:
        fetches = [Fetch(key, buffer) for (key, _), buffer in zip(parts, buffers, strict=True)]
        if not all(tier.fetch(fetches).result()):
            raise RuntimeError("a part did not come")

    readings: dict[str, Callable[[], None]] = {
        "tier": lambda: fetch(buffers),
        "tier, new buffers": lambda: fetch(new_buffer(size) for _, size in parts),
        "tier, new zeros": lambda: fetch(memoryview(bytearray(size)) for _, size in parts),
        "dd": lambda: dd(files),
        "dd direct": lambda: dd(files, "iflag=direct"),
        "plain, 1 thread": lambda: read_plainly(files, 1),
        f"plain, {readers} threads": lambda: read_plainly(files, readers),
    }
    times: dict[str, list[float]] = {name: [] for name in readings}
    for number in range(rounds):
        names = list(readings)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            drop_caches(files)
            began = time.monotonic()
            readings[name]()
            times[name].append(time.monotonic() - began)
    tier.close()
    found = {name: total / MEBIBYTE / statistics.median(each) for name, each in times.items()}
    return {"MiB": total / MEBIBYTE, "files": len(files), "write": total / MEBIBYTE / seconds, **found}


def main() -> None:
    """Measure the shapes and print a table."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--folder", type=Path, default=None, help="a folder on the disk to measure")
    arguments.add_argument("--shapes", default="gpt-oss-20b,gemma-4-26b-a4b")
    arguments.add_argument("--tokens", type=int, default=8192)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--readers", type=int, default=4)
    given = arguments.parse_args()
    for shape in given.shapes.split(","):
        folder = Path(tempfile.mkdtemp(prefix="measure-ssd-", dir=given.folder))
        try:
            found = measure(shape, folder, given.tokens, given.rounds, given.readers)
        finally:
            shutil.rmtree(folder)
        print(f"{shape}: {given.tokens} tokens, {found['files']:.0f} files, {found['MiB']:.0f} MiB")
        print(f"  written at {found['write']:.0f} MiB/s")
        for name in list(found)[3:]:
            share = ""
            if not name.startswith("tier"):
                reused, new = (found[tier] / found[name] for tier in ("tier", "tier, new buffers"))
                share = f", the tier has {reused:.0%} of it, {new:.0%} with new buffers"
            print(f"  {name}: {found[name]:.0f} MiB/s{share}")


if __name__ == "__main__":
    main()
