"""Engines that hang: rebuilt over the same weights with the same grant, or unloaded; on real threads that hang."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from toy_machine import GIB, ToyMachine, ask

from darkbloom_core.engine import Engine
from darkbloom_core.engine._liveness import WedgeRule
from darkbloom_core.errors import GenerationFailed, ModelNotReady


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Two models; a hang is confirmed after 50 ms and its thread left behind after as many; nobody polls."""
    monkeypatch.setattr("darkbloom_core.engine._liveness.CONFIRMED", WedgeRule(1, 0.05))
    monkeypatch.setattr("darkbloom_core.slots._engines.STUCK_SECONDS", 0.05)
    monkeypatch.setattr("darkbloom_core.slots._recovery.WEDGE_POLL_SECONDS", 0)
    toy = ToyMachine(tmp_path)
    toy.load("hangs", 10)
    toy.load("neighbour", 8)
    yield toy
    toy.close()


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def hang(toy: ToyMachine, name: str = "request"):
    """Let a request of the first model hang in a step until it is known; gives its stream."""
    slot = toy.slots.get("hangs")
    toy.family.stuck.set()
    stream = ask(slot, name=name)
    wait_for(lambda: slot.engine.status().wedge == "confirmed")
    toy.family.stuck.clear()
    return stream


def end_of(stream):
    return list(stream)[-1]


def test_a_hung_engine_is_rebuilt_with_the_same_grant_and_its_neighbour_sees_nothing(toy, monkeypatch):
    slot, neighbour = toy.slots.get("hangs"), toy.slots.get("neighbour")
    grants = toy.grants()
    resized: list[str] = []
    real = Engine.resize
    monkeypatch.setattr(
        Engine, "resize", lambda engine, grant: (resized.append(engine._name), real(engine, grant))[1]
    )
    before = list(ask(neighbour))
    stream = hang(toy)
    assert slot.activity == "crashed"
    began = time.monotonic()
    toy.slots.recover_wedged()
    assert time.monotonic() - began < 10
    assert isinstance(end_of(stream).error, GenerationFailed)
    assert toy.states("hangs")[-2:] == ["reloading", "serving"]
    assert toy.grants() == grants
    assert set(resized) == {"hangs"}
    assert toy.family.loads == ["hangs", "neighbour"]  # the weights were not read again
    assert end_of(ask(slot, name="after")).reason == "length"
    assert [getattr(event, "deltas", None) for event in before] == [
        getattr(event, "deltas", None) for event in ask(neighbour, name="again")
    ]
    assert slot.activity == "idle"


def test_a_slow_engine_is_not_a_hung_one(toy):
    slot = toy.slots.get("hangs")
    stream = ask(slot, tokens=2000)
    engine = slot.engine
    for _ in range(20):
        toy.slots.recover_wedged()
        time.sleep(0.01)
    assert slot.engine is engine
    stream.cancel()
    list(stream)


def test_a_suspected_hang_is_only_told(toy, monkeypatch):
    monkeypatch.setattr("darkbloom_core.engine._liveness.CONFIRMED", WedgeRule(1, 1000.0))
    monkeypatch.setattr("darkbloom_core.engine._liveness.SUSPECTED", WedgeRule(1, 0.05))
    slot = toy.slots.get("hangs")
    engine = slot.engine
    toy.family.stuck.set()
    stream = ask(slot)
    wait_for(lambda: engine.status().wedge == "suspected")
    assert slot.activity == "crashed"
    toy.slots.recover_wedged()
    assert (slot.engine, slot.state) == (engine, "serving")
    toy.family.freed.set()
    assert isinstance(end_of(stream).error, GenerationFailed)


def test_what_hangs_again_within_the_cooldown_is_unloaded_and_after_it_recovered(toy):
    slot = toy.slots.get("hangs")
    hang(toy, "first")
    toy.slots.recover_wedged()
    slot.recovered_at -= 121
    hang(toy, "second")
    toy.slots.recover_wedged()
    assert slot.state == "serving"
    hang(toy, "third")
    toy.slots.recover_wedged()
    assert toy.states("hangs")[-2:] == ["unloading", "absent"]
    assert [each.name for each in toy.slots.slots()] == ["neighbour"]


def test_a_slot_that_recovers_is_not_ready_and_neither_idle_nor_evictable(toy, monkeypatch):
    slot = toy.slots.get("hangs")
    hang(toy)
    building, go_on = threading.Event(), threading.Event()
    real = Engine.start

    def start(engine, *grants):
        building.set()
        assert go_on.wait(20)
        real(engine, *grants)

    monkeypatch.setattr(Engine, "start", start)
    recovery = threading.Thread(target=toy.slots.recover_wedged)
    recovery.start()
    assert building.wait(20)
    assert slot.activity == "reloading"
    with pytest.raises(ModelNotReady, match="reloading"):
        toy.slots.acquire("hangs")
    toy.family.freed.set()  # the hung step returns, and nothing runs or waits any more
    wait_for(lambda: slot.engine.status().running + slot.engine.status().waiting == 0)
    assert not toy.slots._evict(lambda each: each is slot)
    go_on.set()
    recovery.join(20)
    assert toy.slots.acquire("hangs") is slot


def test_unloading_during_a_recovery_discards_the_new_engine(toy, monkeypatch):
    hang(toy)
    building, go_on = threading.Event(), threading.Event()
    engines: list[Engine] = []
    real = Engine.start

    def start(engine, *grants):
        engines.append(engine)
        building.set()
        assert go_on.wait(20)
        real(engine, *grants)

    monkeypatch.setattr(Engine, "start", start)
    recovery = threading.Thread(target=toy.slots.recover_wedged)
    recovery.start()
    assert building.wait(20)
    toy.slots.unload("hangs")
    go_on.set()
    recovery.join(20)
    assert [slot.name for slot in toy.slots.slots()] == ["neighbour"]
    assert toy.states("hangs")[-1] == "absent"
    assert not engines[0].alive
    toy.family.freed.set()  # the hung thread returns at last, and with it the weights
    wait_for(lambda: (gc.collect(), toy.machine.weights)[1] == 8 * GIB)


def test_a_recovery_that_fails_unloads_the_slot(toy, monkeypatch):
    hang(toy)

    def start(engine, *grants):
        raise RuntimeError("no")

    monkeypatch.setattr(Engine, "start", start)
    toy.slots.recover_wedged()
    assert [slot.name for slot in toy.slots.slots()] == ["neighbour"]


def test_an_engine_that_died_refuses_with_500_and_its_model_is_loaded_again_when_asked_for(toy, monkeypatch):
    slot = toy.slots.get("hangs")
    before = toy.grants()

    def plan(*_):
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(slot.engine._loop.scheduler, "plan", plan)
    assert isinstance(end_of(ask(slot)).error, GenerationFailed)
    wait_for(lambda: not slot.engine.alive)
    assert (slot.activity, slot.engine.status().healthy) == ("crashed", False)
    with pytest.raises(GenerationFailed, match="the engine of hangs has failed") as raised:
        ask(toy.slots.get("hangs"))
    assert raised.value.status == 500
    toy.slots.recover_wedged()
    assert [each.name for each in toy.slots.slots()] == ["neighbour"]
    again = toy.slots.acquire("hangs")
    assert end_of(ask(again)).reason == "length"
    assert toy.grants() == before


def test_memory_of_a_thread_that_was_left_behind_is_counted_until_it_returns(toy):
    hang(toy, "first")
    before = toy.slots.memory.budget()
    toy.slots.unload("hangs")
    slabs = before + 10 * GIB - toy.slots.memory.budget()
    assert toy.slots.memory.budget() < before + 10 * GIB - 2**18
    assert slabs >= 10 * GIB  # the weights are still there: nobody may have them
    toy.family.freed.set()
    wait_for(lambda: toy.slots.memory.budget() == before + 10 * GIB)


def test_the_keeper_finds_a_hung_engine_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("darkbloom_core.engine._liveness.CONFIRMED", WedgeRule(1, 0.05))
    monkeypatch.setattr("darkbloom_core.slots._engines.STUCK_SECONDS", 0.05)
    monkeypatch.setattr("darkbloom_core.slots._recovery.WEDGE_POLL_SECONDS", 0.02)
    toy = ToyMachine(tmp_path)
    slot = toy.load("hangs", 1)
    toy.family.stuck.set()
    stream = ask(slot)
    wait_for(lambda: slot.engine.status().wedge == "confirmed" or slot.state == "reloading")
    toy.family.stuck.clear()
    assert isinstance(end_of(stream).error, GenerationFailed)
    wait_for(lambda: slot.state == "serving")
    toy.close()
