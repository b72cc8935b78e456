"""What is kept of each prompt is enough for conversations to go on and to branch, in budgets that hold few windows."""

from __future__ import annotations

import random
from itertools import pairwise

from darkbloom_core.contracts import LayerKind, PartKey
from darkbloom_core.prefix import (
    BLOCK_TOKENS,
    PART_NAMES,
    Costs,
    PartLayout,
    RamTier,
    TailPolicy,
    block_hashes,
    plan_reuse,
    saved_milliseconds,
)

WINDOW = LayerKind(q_heads=8, kv_heads=8, k_dim=256, v_dim=256, window=1024)
FULL = LayerKind(q_heads=8, kv_heads=2, k_dim=512, v_dim=512)
LAYERS = (*[WINDOW] * 5, FULL) * 2
"""Five sliding layers to a full one, windows of four blocks: a window state is much larger than its block."""

COSTS = Costs(prefill_milliseconds_per_token=1.0, fetch_milliseconds_per_byte={"ram": 0.0})


class Cache:
    """What an engine does with the room's parts, without the engine: plan, then run the rest and keep."""

    def __init__(self, limit_bytes, layers=LAYERS, grid=256):
        self.layout = PartLayout(layers, grid)
        self.ram = RamTier(limit_bytes)
        self.tails = TailPolicy()
        self.grid = grid

    def request(self, tokens):
        """How many tokens were reused."""
        cuts = [*range(self.grid, len(tokens), self.grid), len(tokens)]
        names = block_hashes(tokens, cuts, b"root")
        keys = {(block, part): PartKey(one, part) for block, one in enumerate(names) for part in PART_NAMES}
        parts = self.layout.of(cuts)
        plan = plan_reuse(
            parts,
            lambda block, part: "ram" if self.ram.probe(keys[block, part]) is not None else None,
            COSTS,
        )
        if plan.missed_boundary is not None:
            self.tails.missed(names[parts.count(plan.missed_boundary) - 1])
        self.ram.pin([keys[one.block, one.part] for one in plan.fetches]).release()
        tails = self.tails.to_keep(parts, names)
        for block in range(plan.tokens // BLOCK_TOKENS, cuts[-1] // self.grid * self.grid // BLOCK_TOKENS):
            parent = names[block - 1] if block else None
            for part in PART_NAMES:
                size = parts.part_bytes(block, part)
                if size and (part == "full" or (block, part) in tails):
                    self.ram.keep(
                        keys[block, part],
                        object(),
                        size,
                        saves_milliseconds=saved_milliseconds(block, part, parts, 1.0),
                        parent=parent,
                    )
        self.ram.renew(keys[one] for one in sorted(tails))
        return plan.tokens


def conversation(seed, turns, tokens_each=700, rewritten=5):
    """Prompts of a conversation that grows; each turn rewrites the last few tokens of the one before."""
    chance = random.Random(seed)
    prompts, prompt = [], []
    for _ in range(turns):
        prompt = prompt[: len(prompt) - rewritten] + [chance.randrange(1000) for _ in range(tokens_each)]
        prompts.append(prompt)
    return prompts


def common(one, other):
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def window_states(count):
    parts = PartLayout(LAYERS, 256).of(CUTS)
    return count * sum(parts.part_bytes(*one) for one in parts.needs_at(4096))


def full_parts(tokens):
    return tokens // BLOCK_TOKENS * PartLayout(LAYERS, 256).of(CUTS).part_bytes(0, "full")


def test_thirty_growing_turns_in_a_budget_of_twelve_window_states_reuse_all_but_a_chunk():
    cache = Cache(window_states(12))
    prompts = conversation(1, 30)
    cache.request(prompts[0])
    for before, prompt in pairwise(prompts):
        reused = cache.request(prompt)
        assert common(before, prompt) - 256 <= reused <= common(before, prompt)


def test_a_repeated_prompt_reuses_all_but_a_chunk_of_any_length():
    for length in (257, 512, 513, 2000, 4096, 4097):
        for grid in (256, 512):
            cache = Cache(window_states(12), grid=grid)
            prompt = [*range(length)]
            cache.request(prompt)
            assert cache.request(prompt) >= length - 1 - grid


def test_where_conversations_branch_is_learned_from_the_second_on():
    cache = Cache(window_states(12))
    system = [*range(3000)]
    reused = [cache.request([*system, *[5000 + user] * 1500]) for user in range(4)]
    assert reused == [0, 0, 2816, 2816], "the second recomputes and keeps what the branch needs"


def test_four_conversations_in_turns_all_go_on():
    cache = Cache(window_states(8))
    conversations = [conversation(seed, 8) for seed in range(4)]
    for turn in range(8):
        for prompts in conversations:
            reused = cache.request(prompts[turn])
            if turn:
                assert reused >= common(prompts[turn - 1], prompts[turn]) - 256


def goes_on(cache, prompts, turn):
    return cache.request(prompts[turn]) >= common(prompts[turn - 1], prompts[turn]) - 256


def test_a_long_prompt_that_nobody_asks_for_again_gives_way_to_short_ones():
    cache = Cache(window_states(8))
    cache.request([*range(20_000)])
    shorts = [conversation(seed, 9, tokens_each=500) for seed in range(2)]
    reused = [goes_on(cache, prompts, turn) for turn in range(1, 9) for prompts in shorts]
    assert all(reused[4:])


def test_a_conversation_goes_on_in_a_budget_of_two_window_states():
    cache = Cache(window_states(2))
    prompts = conversation(1, 10)
    reused = [cache.request(prompt) for prompt in prompts]
    assert sum(found > 0 for found in reused[1:]) >= 8


def test_hits_come_back_when_fewer_conversations_go_on_than_were_too_many():
    cache = Cache(window_states(8))
    many = [conversation(seed, 6) for seed in range(12)]
    for turn in range(1, 6):
        for prompts in many:
            cache.request(prompts[turn])
    few = [conversation(seed, 14) for seed in range(2)]
    reused = [goes_on(cache, prompts, turn) for turn in range(6, 14) for prompts in few]
    assert all(reused[2:])


def test_recurrent_layers_go_on_from_their_state():
    cache = Cache(10**9, layers=(FULL, LayerKind(state=((64, 64),), dtype="float32")), grid=512)
    prompts = conversation(3, 6)
    cache.request(prompts[0])
    for before, prompt in pairwise(prompts):
        assert cache.request(prompt) >= common(before, prompt) - 512


CUTS = [*range(256, 10_000, 256), 10_000]
NAMES = [bytes([block]) for block in range(40)]


def parts_of(cuts):
    return PartLayout(LAYERS, 256).of(cuts)


def blocks(policy):
    return {block for block, _ in policy.to_keep(parts_of(CUTS), NAMES)}


def test_tails_are_kept_at_the_last_two_boundaries_and_where_one_was_missed():
    policy = TailPolicy()
    assert blocks(policy) == {34, 35, 36, 37, 38}
    policy.missed(NAMES[9])
    assert blocks(policy) == {6, 7, 8, 9, 34, 35, 36, 37, 38}


def test_a_boundary_that_was_kept_before_is_learned_from_the_second_miss_on():
    policy = TailPolicy()
    policy.to_keep(parts_of([256 * count for count in range(1, 11)]), NAMES[:10])
    policy.missed(NAMES[9])
    assert blocks(policy) == {34, 35, 36, 37, 38}
    policy.missed(NAMES[9])
    assert blocks(policy) == {6, 7, 8, 9, 34, 35, 36, 37, 38}


def test_only_so_many_boundaries_are_remembered_and_the_longest_unasked_goes():
    policy = TailPolicy(most=4)
    for block in (3, 9, 15, 3, 21, 27):
        policy.missed(NAMES[block])
    assert len(policy) == 4
    assert blocks(policy) >= {3, 15, 21, 27}
    assert not blocks(policy) & {9}


def test_a_tail_is_worth_what_it_opens_up_within_a_limit():
    parts = parts_of([*range(256, 30_000, 256), 30_000])
    assert saved_milliseconds(9, "full", parts, 2.0) == 512
    assert saved_milliseconds(7, "window", parts, 2.0) == 1024 * 2 / 4
    assert saved_milliseconds(1, "window", parts, 2.0) == 512 * 2 / 2
    assert saved_milliseconds(99, "window", parts, 2.0) == 1024 * 2 / 4
