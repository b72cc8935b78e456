"""Below the core's own tiers: layouts of both kinds, reservations, many requests at once, and removal."""

from __future__ import annotations

import random
import threading
import time

import pytest

from darkbloom_core.contracts import LayerKind, PartKey
from darkbloom_core.memory import Ledger
from darkbloom_core.prefix import CacheStack, Costs, PartLayout, RamTier, block_hashes, chain_root, plan_reuse

COSTS = Costs(prefill_milliseconds_per_token=1.0, fetch_milliseconds_per_byte={"ram": 0.0, "disk": 0.0})
FULL = LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8)
LAYOUTS = {
    "a window shorter than a block": PartLayout(
        [FULL, LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8, window=128, sinks=True)], 256
    ),
    "a window of several blocks, and layers that borrow": PartLayout(
        [
            LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8, window=1024),
            FULL,
            LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=8, source=1),
        ],
        512,
    ),
}


def prompt(layout, blocks, branch=0, shared=None, cuts=None):
    """Parts and names of a prompt of whole blocks and a token; ``cuts`` are its chunk ends, else those of the grid."""
    shared = blocks if shared is None else shared
    ids = [number % 97 for number in range(256 * shared)] + [98 + branch] * (256 * (blocks - shared) + 1)
    grid = layout.grid_tokens
    cuts = [*(cuts or range(grid, len(ids), grid)), len(ids)]
    return layout.of(cuts), block_hashes(ids, cuts, chain_root(b"n" * 32, b""))


def needed(parts):
    """Every part that a reuse at the last boundary needs, in order."""
    boundary = parts.boundaries[-1]
    full = [(block, "full") for block in range(parts.count(boundary)) if parts.needs_full(block)]
    return [*full, *parts.needs_at(boundary)]


def bytes_of(parts, names, block, part):
    return random.Random(names[block] + part.encode()).randbytes(parts.part_bytes(block, part))


def offer_all(stack, parts, names):
    for block, part in needed(parts):
        data = bytes_of(parts, names, block, part)
        stack.offer_below(PartKey(names[block], part), lambda data=data: memoryview(data))


def staged(stack, parts, names, request="r"):
    """Stage the prompt; gives how many tokens came, and checks their bytes."""
    plan = plan_reuse(parts, stack.where(names, parts), COSTS)
    if plan.tokens == 0:
        return 0
    staging = stack.stage(request, plan, names)
    if staging is None:
        return 0
    try:
        until = time.monotonic() + 30
        while not staging.is_ready:
            assert time.monotonic() < until
            time.sleep(0.0005)
        came = staging.parts()
        if came is None:
            return 0
        for each in came:
            assert bytes(each.data) == bytes_of(parts, names, each.block, each.part)
        return plan.tokens
    finally:
        staging.close()


@pytest.mark.parametrize("cuts", [None, (200, 470, 512, 1100, 2555)], ids=["text", "pictures"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_after_a_restart_nothing_of_a_prompt_is_computed_again_windows_included(place, name, cuts):
    """Pictures move chunk ends off the grid, so their blocks have many lengths."""
    layout, ledger = LAYOUTS[name], Ledger(lambda pool: 1 << 30)
    parts, names = prompt(layout, 10, cuts=cuts)
    tier = place.open()
    offer_all(CacheStack(RamTier(0), {"disk": tier}, ledger), parts, names)
    assert tier.settle()
    place.restart()
    stack = CacheStack(RamTier(0), {"disk": place.open()}, ledger)
    assert staged(stack, parts, names) == (2560 if cuts is None else cuts[-1])
    assert not ledger.reservations()
    assert stack.faults() == {"disk": 0}


def test_a_damaged_part_costs_a_hit_and_the_next_one_uses_the_rest(place):
    layout, ledger = LAYOUTS["a window shorter than a block"], Ledger(lambda pool: 1 << 30)
    tier = place.open()
    stack = CacheStack(RamTier(0), {"disk": tier}, ledger)
    for blocks in (3, 6):
        parts, names = prompt(layout, blocks)
        offer_all(stack, parts, names)
    assert tier.settle()
    place.file_of(PartKey(names[4], "full")).write_bytes(b"damaged")
    assert staged(stack, parts, names) == 0
    assert staged(stack, parts, names) == 768
    assert tier.stats().damaged == 1
    assert not ledger.reservations()


def test_32_requests_stage_what_overlaps_while_others_are_written_and_evicted(place):
    layout = LAYOUTS["a window shorter than a block"]
    ledger = Ledger(lambda pool: 1 << 22)
    tier = place.open(bytes_limit=120 * 16384)
    stack = CacheStack(RamTier(0), {"disk": tier}, ledger)
    prompts = [prompt(layout, 12, branch, shared=6) for branch in range(16)]
    for one in prompts[:6]:
        offer_all(stack, *one)
    faults, hits = [], []
    over = threading.Event()

    def ask(number):
        try:
            chance = random.Random(number)
            while not over.is_set():
                hits.append(staged(stack, *chance.choice(prompts), request=f"{number}"))
        except BaseException as fault:
            faults.append(fault)

    def write():
        chance = random.Random(99)
        while not over.is_set():
            parts, names = chance.choice(prompts)
            offer_all(stack, parts, names)
            stack.used([PartKey(names[block], part) for block, part in needed(parts)])
            if chance.random() < 0.2:
                tier.forget([PartKey(names[chance.randrange(12)], "full")])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    threads.append(threading.Thread(target=write))
    for thread in threads:
        thread.start()

    def enough():
        return len(hits) > 200 and max(hits) == 3072 and tier.stats().evicted > 20

    until = time.monotonic() + 60
    while not faults and not enough() and time.monotonic() < until:
        time.sleep(0.01)
    over.set()
    for thread in threads:
        thread.join(60)
    assert not faults, faults[0]
    assert enough(), (len(hits), max(hits), tier.stats())
    assert tier.stats().damaged == 0
    assert tier.settle()
    assert not ledger.reservations()
    assert place.reserved == {"m": 0}
    assert sum(-(-file.stat().st_size // 4096) * 4096 for file in place.files()) <= 120 * 16384
