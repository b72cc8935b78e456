"""What a fleet is told of each slot: the worst case that was promised, and budgets that follow the shares."""

from __future__ import annotations

import time

import pytest
from toy_machine import ToyMachine, ask


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
