"""What a fleet is told of each slot: the worst case that was promised, and budgets that follow the shares."""

from __future__ import annotations

import time

import pytest
from toy_machine import ToyMachine, ask

from darkbloom_core.engine._kv import GROWTH_TOKENS
from darkbloom_core.errors import CapacityExhausted


@pytest.fixture
def toy(tmp_path):
    toy = ToyMachine(tmp_path)
    yield toy
    toy.close()


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_budgets_follow_the_shares_and_what_is_used_is_the_worst_case(toy):
    slot = toy.load("b", 10)
    (alone,) = toy.slots.capacity()
    rate = slot.description.kv_bytes_per_token
    assert alone.kv_bytes_per_token == rate == 128
    assert alone.token_budget == (slot.grant_bytes - slot.engine.slab_bytes) // rate
    assert (alone.activity, alone.running, alone.committed_tokens) == ("idle", 0, 0)
    toy.load("a", 8)
    assert [each.model for each in toy.slots.capacity()] == ["a", "b"]
    assert toy.slots.capacity()[1].token_budget < alone.token_budget
    streams = [ask(slot, tokens=2000, name=name) for name in ("one", "two", "three")]
    wait_for(lambda: toy.slots.capacity()[1].running == 2 and toy.slots.capacity()[1].active_tokens > 0)
    busy = toy.slots.capacity()[1]
    assert (busy.activity, busy.max_rows, busy.waiting) == ("running", 2, 1)
    assert busy.committed_tokens == 3 * 2005
    assert 0 < busy.active_tokens < busy.committed_tokens
    for stream in streams:
        stream.cancel()
        list(stream)
    toy.slots.unload("a")
    assert toy.slots.capacity()[0].token_budget == alone.token_budget


def test_a_model_may_have_fewer_or_more_rows_than_the_others_and_says_so(tmp_path):
    toy = ToyMachine(tmp_path, max_rows={"few": 1, "many": 5})
    for name in ("few", "many", "usual"):
        toy.load(name, 1)
    assert {each.model: each.max_rows for each in toy.slots.capacity()} == {"few": 1, "many": 5, "usual": 2}
    slot = toy.slots.get("few")
    streams = [ask(slot, tokens=2000, name=name) for name in ("one", "two")]
    wait_for(lambda: slot.engine.status().running == 1)
    assert (slot.engine.status().running, slot.engine.status().waiting) == (1, 1)
    for stream in streams:
        stream.cancel()
        list(stream)
    toy.close()


def test_engine_slot_and_what_is_told_agree_and_admission_goes_by_it_to_the_block(toy):
    slot = toy.load("a", 10, context_tokens=10**9)
    other = toy.load("b", 8, wide=True, context_tokens=10**9)
    for each, told in zip((slot, other), toy.slots.capacity(), strict=True):
        status, rate = each.engine.status(), each.description.kv_bytes_per_token
        assert status.kv_bytes_grant == each.grant_bytes
        assert each.engine._share.limit_bytes == each.grant_bytes
        assert status.kv_bytes_reserved == each.slab_bytes
        assert told.token_budget == (each.grant_bytes - each.slab_bytes) // rate
        assert (told.max_rows, told.kv_bytes_per_token) == (status.max_rows, rate)
        whole = told.token_budget // GROWTH_TOKENS * GROWTH_TOKENS
        with pytest.raises(CapacityExhausted):
            ask(each, tokens=whole + 1 - 5)
        stream = ask(each, tokens=whole - 5)
        wait_for(lambda engine=each.engine: engine.status().running == 1)
        stream.cancel()
        list(stream)


def test_rates_are_those_of_requests_that_ended_well(toy):
    slot = toy.load("model", 1)
    stream = ask(slot, tokens=1000)
    stream.cancel()
    list(stream)
    (before,) = toy.slots.capacity()
    assert (before.prefill_rate, before.decode_rate) == (None, None)
    list(ask(slot, tokens=20, prompt_tokens=40))
    (after,) = toy.slots.capacity()
    assert after.decode_rate > 0
    assert after.load_seconds > 0
