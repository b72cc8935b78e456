"""Tiers over real folders, with a key of their own and a clock that a test may set."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path

import pytest
from darkbloom_ssd_tier._keys import Keys
from darkbloom_ssd_tier._store import Stores
from darkbloom_ssd_tier._tier import SsdTier, SsdTierFactory

from darkbloom_core.contracts import Fetch, PartKey, TierContext


class Events:
    """An emitter that keeps what it is given."""

    def __init__(self):
        self.all = []

    def emit(self, event):
        self.all.append(event)

    def of(self, kind):
        return [event for event in self.all if isinstance(event, kind)]


class Clock:
    """Seconds since 1970: the real ones, plus what a test adds."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.time() + self.ahead


class Place:
    """A cache folder and its key. Each ``restart`` is another process's view of the same folder."""

    def __init__(self, base: Path):
        self.base = base
        self.folder = base / "cache"
        self.key_file = base / "keys" / "ssd.key"
        self.events = Events()
        self.clock = Clock()
        self.reserved: dict[str, int] = {}
        self.memory = 1 << 40
        self.opened: list[SsdTier] = []
        self.stores = Stores(self.clock)

    def options(self, **options):
        quick = {"write_bytes_per_second": 1 << 40, "free_bytes_floor": 0, "first_sight_share": 1.0}
        return {"key_store": "file", "key_file": str(self.key_file), **quick, **options}

    def open(self, model="m", *, wait=True, bytes_limit=1 << 30, **options) -> SsdTier:
        def reserve(size):
            if size > self.reserved.get(model, 0) and size > self.memory:
                return False
            self.reserved[model] = size
            return True

        context = TierContext(
            model=model,
            directory=self.folder,
            bytes_limit=bytes_limit,
            options=self.options(**options),
            reserve=reserve,
            emitter=self.events,
        )
        tier = SsdTierFactory(self.stores).open(context)
        self.opened.append(tier)
        if wait:
            assert tier.settle()
        return tier

    def restart(self):
        """Close all tiers; what is opened next starts from the disk."""
        self.close()
        self.stores = Stores(self.clock)

    def other_process(self) -> Place:
        """The same folder, seen by somebody who shares no memory with this one."""
        other = Place(self.base)
        other.clock = self.clock
        other.stores = Stores(self.clock)
        self.opened.append(other)
        return other

    def close(self):
        for each in self.opened:
            each.close()
        self.opened.clear()

    @property
    def keys(self) -> Keys:
        return Keys.derived(bytes.fromhex(self.key_file.read_text().strip()))

    def files(self, suffix="*.v1") -> list[Path]:
        return sorted(self.folder.glob(f"*/{suffix}"))

    def file_of(self, key: PartKey, model="m") -> Path:
        keys = self.keys
        return self.folder / keys.folder_name(model) / f"{keys.part_name(key.block, key.part).hex()}.v1"


def part(number: int, name: str = "full", branch: str = "") -> PartKey:
    """The key of the part of a made-up block."""
    return PartKey(hashlib.sha256(f"{branch}{number}".encode()).digest(), name)


def content(key: PartKey, size: int = 5000) -> bytes:
    """What that part holds: always the same for the same key."""
    return random.Random(key.block + key.part.encode()).randbytes(size)


def offer(tier, keys, size: int = 5000) -> list[bool]:
    return [tier.offer(key, memoryview(content(key, size))) for key in keys]


def put(tier, keys, size: int = 5000):
    """Offer and wait until all is on disk."""
    assert all(offer(tier, keys, size)), tier.stats()
    assert tier.settle()


def get(tier, keys, size: int = 5000) -> list[bool]:
    """Fetch; checks that whatever is said to have come is right."""
    buffers = [memoryview(bytearray(size)) for _ in keys]
    came = tier.fetch([Fetch(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]).result(30)
    for key, buffer, is_there in zip(keys, buffers, came, strict=True):
        assert not is_there or buffer == content(key, size), "a part came that is not what was offered"
    return list(came)


@pytest.fixture
def place(tmp_path):
    found = Place(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="session")
def ssd():
    """What tests need besides: ``ssd.part``, ``ssd.content``, ``ssd.offer``, ``ssd.put``, ``ssd.get``, ``ssd.Place``."""
    import types

    return types.SimpleNamespace(part=part, content=content, offer=offer, put=put, get=get, Place=Place)
