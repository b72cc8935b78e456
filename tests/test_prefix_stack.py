"""The tiers as one: asked from the top, bytes reserved first, everything given back, and a tier's faults its own."""

from __future__ import annotations

import mmap
import random
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darkbloom_core.contracts import LayerKind, PartKey, TierStats
from darkbloom_core.memory import Ledger
from darkbloom_core.prefix import (
    RAM,
    CacheStack,
    Costs,
    PartLayout,
    RamTier,
    Rates,
    block_hashes,
    chain_root,
    plan_reuse,
    scope_salt,
)
from darkbloom_core.prefix._stack import new_buffer

FULL = LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8)
WINDOW = LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8, window=300)
COSTS = Costs(
    prefill_milliseconds_per_token=1.0, fetch_milliseconds_per_byte={RAM: 0.0, "disk": 0.0, "far": 0.0}
)
CUTS = [256, 512, 768, 1000]
PARTS = PartLayout([FULL, WINDOW], 256).of(CUTS)
NAMES = block_hashes(range(1000), CUTS, b"root")


class BytesTier:
    """A tier of bytes in a dictionary, with a thread of its own; ``gate`` holds its reads back."""

    def __init__(self):
        self.parts = {}
        self.damaged = set()
        self.gate = threading.Event()
        self.gate.set()
        self.threads = ThreadPoolExecutor(1)

    def probe(self, keys):
        return [len(self.parts[key]) if key in self.parts else None for key in keys]

    def fetch(self, fetches):
        return self.threads.submit(self._read, list(fetches))

    def _read(self, fetches):
        assert self.gate.wait(10)
        for one in fetches:
            if one.key in self.parts:
                one.buffer[:] = self.parts[one.key]
        return [one.key in self.parts and one.key not in self.damaged for one in fetches]

    def offer(self, key, data):
        self.parts[key] = bytes(data)
        return True

    def used(self, keys):
        return [key not in self.parts for key in keys]

    def forget(self, keys):
        for key in keys:
            self.parts.pop(key, None)

    def stats(self):
        return TierStats(parts=len(self.parts))

    def close(self):
        self.gate.set()
        self.threads.shutdown()


@pytest.fixture
def disk():
    tier = BytesTier()
    yield tier
    tier.close()


@pytest.fixture
def ledger():
    return Ledger(lambda pool: 10**6)


@pytest.fixture
def stack(disk, ledger):
    return CacheStack(RamTier(10**6), {"disk": disk}, ledger)


def content(block, part):
    size = PARTS.part_bytes(block, part)
    return random.Random(f"{block}{part}").randbytes(size)


def fill(stack, blocks, *, ram=True):
    """Offer the parts of these blocks; without ``ram`` they stay below only."""
    for block in blocks:
        for part in ("full", "window"):
            data = content(block, part)
            stack.offer(
                PartKey(NAMES[block], part),
                data,
                len(data),
                saves_milliseconds=1.0,
                parent=NAMES[block - 1] if block else None,
                data=lambda data=data: memoryview(data),
            )
    if not ram:
        stack.ram.resize(0)
        stack.ram.resize(10**6)


def plan_of(stack):
    return plan_reuse(PARTS, stack.where(NAMES, PARTS), COSTS)


def test_parts_are_taken_from_the_first_place_that_has_them(stack, disk):
    fill(stack, [0, 1, 2], ram=False)
    fill(stack, [0])
    plan = plan_of(stack)
    assert plan.tokens == 768
    assert {(one.block, one.place) for one in plan.fetches} == {(0, RAM), (1, "disk"), (2, "disk")}


def test_what_is_staged_is_what_was_offered(stack, ledger):
    fill(stack, [0, 1, 2], ram=False)
    fill(stack, [0])
    plan = plan_of(stack)
    staging = stack.stage("r", plan, NAMES)
    ready = threading.Event()
    staging.when_ready(ready.set)
    assert ready.wait(10)
    assert staging.is_ready
    parts = staging.parts()
    assert [(one.block, one.part) for one in parts] == [
        (0, "full"), (1, "full"), (1, "window"), (2, "full"), (2, "window"),
    ]  # fmt: skip
    for one in parts:
        assert (one.item if one.data is None else bytes(one.data)) == content(one.block, one.part)
        assert (one.data is None) == (one.block == 0)
    staging.close()
    staging.close()
    assert not ledger.reservations()
    assert stack.ram.stats().detail["pinned_bytes"] == 0


def test_bytes_from_below_are_reserved_before_and_until_the_tier_has_let_go_of_the_buffers(
    stack, disk, ledger
):
    fill(stack, [0, 1, 2], ram=False)
    disk.gate.clear()
    staging = stack.stage("r", plan_of(stack), NAMES)
    (entry,) = ledger.reservations().values()
    assert (entry.kind, entry.pool) == ("blocks", "host")
    assert entry.size_bytes == plan_of(stack).size_bytes
    while not staging._coming[0][0].running():
        pass
    staging.close()
    assert ledger.reservations(), "the tier still writes"
    disk.gate.set()
    disk.threads.submit(lambda: None).result(10)
    assert not ledger.reservations()


def test_without_memory_nothing_is_staged_and_nothing_is_left(disk):
    ledger = Ledger(lambda pool: 1000)
    stack = CacheStack(RamTier(10**6), {"disk": disk}, ledger)
    fill(stack, [0, 1, 2], ram=False)
    fill(stack, [0])
    assert stack.stage("r", plan_of(stack), NAMES) is None
    assert not ledger.reservations()
    assert stack.ram.stats().detail["pinned_bytes"] == 0


def test_what_was_evicted_since_the_plan_is_a_miss(stack, ledger):
    fill(stack, [0, 1, 2])
    plan = plan_of(stack)
    stack.ram.resize(PARTS.part_bytes(0, "full"))
    assert stack.stage("r", plan, NAMES) is None
    assert not ledger.reservations()


def test_a_damaged_part_is_a_miss(stack, disk, ledger):
    fill(stack, [0, 1, 2], ram=False)
    disk.damaged.add(PartKey(NAMES[1], "full"))
    staging = stack.stage("r", plan_of(stack), NAMES)
    disk.threads.submit(lambda: None).result(10)
    assert staging.parts() is None
    staging.close()
    assert not ledger.reservations()


def test_a_part_of_another_length_is_not_there(stack, disk):
    fill(stack, [0, 1, 2], ram=False)
    disk.parts[PartKey(NAMES[0], "full")] += b"x"
    assert plan_of(stack).tokens == 0


def test_what_came_from_below_is_promoted(stack):
    fill(stack, [0, 1, 2], ram=False)
    data = content(0, "full")
    assert stack.promote(PartKey(NAMES[0], "full"), data, len(data), saves_milliseconds=1.0, parent=None)
    assert plan_of(stack).fetches[0].place == RAM


def test_bytes_are_made_only_for_a_tier_that_lacks_the_part(stack, ledger):
    fill(stack, [0])

    def refused():
        raise AssertionError("the tier below has it")

    key = PartKey(NAMES[0], "full")
    assert stack.offer(key, "item", 10, saves_milliseconds=1.0, parent=None, data=refused)
    alone = CacheStack(RamTier(100), {}, ledger)
    assert alone.offer(key, "item", 10, saves_milliseconds=1.0, parent=None, data=refused)


class BrokenTier(BytesTier):
    """Raises wherever ``breaks`` says, or answers too little."""

    def __init__(self, breaks):
        super().__init__()
        self.breaks = breaks

    def _may(self, name):
        if name == self.breaks:
            raise OSError("broken")

    def probe(self, keys):
        self._may("probe")
        return super().probe(keys)[: 1 if self.breaks == "few" else None]

    def fetch(self, fetches):
        self._may("fetch")
        if self.breaks == "later":
            future = Future()
            future.set_exception(OSError("broken"))
            return future
        if self.breaks == "little":
            future = Future()
            future.set_result([])
            return future
        return super().fetch(fetches)

    def offer(self, key, data):
        self._may("offer")
        return super().offer(key, data)

    def used(self, keys):
        self._may("used")
        return super().used(keys)[: 1 if self.breaks == "few" else None]

    def stats(self):
        self._may("stats")
        return super().stats()

    def close(self):
        super().close()
        self._may("close")


@pytest.mark.parametrize("breaks", ["probe", "few", "fetch", "later", "little", "offer", "stats", "close"])
def test_a_tier_that_fails_in_any_way_only_misses(breaks, ledger, caplog):
    tier = BrokenTier(None)
    stack = CacheStack(RamTier(10**6), {"disk": tier}, ledger)
    fill(stack, [0, 1, 2], ram=False)
    tier.breaks = breaks
    plan = plan_of(stack)
    if plan.tokens:
        staging = stack.stage("r", plan, NAMES)
        if staging is not None:
            while not staging.is_ready:
                pass
            assert (staging.parts() is None) == (breaks in ("later", "little"))
            staging.close()
    fill(stack, [0])
    assert set(stack.stats()) == ({RAM} if breaks == "stats" else {RAM, "disk"})
    stack.close()
    assert not ledger.reservations()
    if breaks not in ("later", "little"):
        tier.forget([PartKey(name, part) for name in NAMES for part in ("full", "window")])
        if breaks == "offer":
            fill(stack, [0])
        assert stack.faults()["disk"] >= 1
        assert sum("disk failed" in record.message for record in caplog.records) == 1


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**20))
def test_whatever_is_evicted_resized_and_cancelled_meanwhile_nothing_leaks_and_no_byte_is_wrong(seed):
    chance = random.Random(seed)
    disk, ledger = BytesTier(), Ledger(lambda pool: 400_000)
    stack = CacheStack(RamTier(150_000), {"disk": disk}, ledger)
    open_stagings = []
    for step in range(30):
        match chance.randrange(5):
            case 0:
                fill(stack, range(chance.randrange(4)))
            case 1:
                stack.ram.resize(chance.randrange(200_000))
            case 2:
                disk.forget(chance.sample(sorted(disk.parts, key=str), len(disk.parts) // 3))
            case 3:
                plan = plan_of(stack)
                staging = stack.stage(f"r{step}", plan, NAMES) if plan.tokens else None
                if staging is not None:
                    open_stagings.append(staging)
            case 4 if open_stagings:
                staging = open_stagings.pop(chance.randrange(len(open_stagings)))
                if staging.is_ready:
                    for one in staging.parts() or ():
                        found = one.item if one.data is None else bytes(one.data)
                        assert found == content(one.block, one.part)
                staging.close()
    for staging in open_stagings:
        staging.close()
    stack.close()
    assert not ledger.reservations()
    assert stack.ram.stats().bytes_used == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables of pages")
def test_a_buffers_pages_are_made_by_who_writes_and_go_with_it():
    size = 8 << 20
    before, shared = resident_bytes(), resident_bytes("shared")
    buffer = new_buffer(size)
    assert resident_bytes() - before < size // 8
    for at in range(0, size, mmap.PAGESIZE):
        buffer[at] = 1
    assert resident_bytes() - before > size // 2
    assert resident_bytes("shared") - shared < size // 8
    del buffer
    assert resident_bytes() - before < size // 8


def resident_bytes(kind="all"):
    return int(Path("/proc/self/statm").read_text().split()[1 + (kind == "shared")]) * mmap.PAGESIZE


# --- rates and scopes ---------------------------------------------------------------------


def test_rates_are_assumed_until_they_are_measured():
    rates = Rates({RAM: 1e-7, "disk": 1e-6})
    assert rates.costs().fetch_milliseconds_per_byte == {RAM: 1e-7, "disk": 1e-6}
    rates.prefilled(256, 512.0)
    rates.fetched("disk", 1000, 5.0)
    assert rates.costs().prefill_milliseconds_per_token == 2.0
    assert rates.costs().fetch_milliseconds_per_byte == {RAM: 1e-7, "disk": 0.005}


def test_a_place_that_looked_too_slow_is_tried_again_some_time():
    rates = Rates(
        {"assumed": 1.0, "measured": 1e-6, "other": 1.0, "other, measured": 1e-6}, hit_milliseconds=3.0
    )
    rates.fetched("measured", 1000, 1000.0)
    rates.fetched("other, measured", 1000, 1000.0)
    assert rates.costs().hit_milliseconds == 3.0
    for _ in range(200):
        rates.declined(["assumed", "measured"])
    found = rates.costs().fetch_milliseconds_per_byte
    assert 0 < found["assumed"] < 1e-3 > found["measured"] > 0
    assert found["other"] == found["other, measured"] == 1.0
    rates.fetched("assumed", 1000, 1000.0)
    assert rates.costs().fetch_milliseconds_per_byte["assumed"] == 1.0, "the first measurement counts whole"


def test_one_odd_measurement_moves_a_rate_only_a_little():
    rates = Rates({})
    rates.prefilled(100, 100.0)
    rates.prefilled(100, 1100.0)
    assert rates.costs().prefill_milliseconds_per_token == pytest.approx(3.0)
    rates.prefilled(0, 1.0)
    rates.prefilled(10, -1.0)
    assert rates.costs().prefill_milliseconds_per_token == pytest.approx(3.0)


scopes = st.one_of(st.none(), st.text(max_size=4))


@given(scopes, scopes, scopes, scopes)
def test_scopes_and_keys_that_differ_have_different_salts(scope, key, other, other_key):
    same = (scope, key) == (other, other_key)
    assert (scope_salt(b"s", scope, key) == scope_salt(b"s", other, other_key)) == same


def test_the_secret_counts():
    assert scope_salt(b"one", "a") != scope_salt(b"other", "a")


def test_different_scopes_never_share_a_block_and_the_same_scope_does():
    chance = random.Random(7)
    for _ in range(1000):
        one, other = (chance.choice([None, "", "a", "b", "ab"]) for _ in range(2))
        tokens = [chance.randint(0, 1)] * 512
        first, second = (
            set(block_hashes(tokens, [256, 512], chain_root(b"n", scope_salt(b"s", scope))))
            for scope in (one, other)
        )
        assert bool(first & second) == (one == other)


def test_the_tiers_below_hear_what_ram_serves_and_say_what_they_would_take(stack, disk):
    fill(stack, [0, 1])
    keys = [PartKey(NAMES[block], "full") for block in range(3)]
    assert stack.used(keys) == (keys[2],)
    disk.forget([keys[0]])
    assert stack.used(keys) == (keys[0], keys[2])


@pytest.mark.parametrize("breaks", ["used", "few"])
def test_a_tier_that_cannot_say_what_it_would_take_takes_nothing(breaks, ledger):
    tier = BrokenTier(breaks)
    stack = CacheStack(RamTier(10**6), {"disk": tier}, ledger)
    assert stack.used([PartKey(name, "full") for name in NAMES]) == ()
    assert stack.faults() == {"disk": 1}
    stack.close()
