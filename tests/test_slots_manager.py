"""Slots on a machine of known size: ordered loads, what is refused, who is evicted, and what a failure leaves behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from toy_machine import GIB, ToyMachine, ask

from darkbloom_core.contracts import EngineSample, LedgerStuck, ReservationDropped
from darkbloom_core.engine import Engine
from darkbloom_core.errors import (
    CheckpointError,
    Draining,
    GrantTooSmall,
    ModelDoesNotFit,
    ModelNotFound,
    ModelNotReady,
    NoSlotFree,
)
from darkbloom_core.memory import KvDemand, hard_cap, kv_grants


@pytest.fixture
def build(tmp_path):
    made: list[ToyMachine] = []

    def build(physical_gib: float = 64, **tables) -> ToyMachine:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(ToyMachine(folder, physical_gib, **tables))
        return made[-1]

    yield build
    for each in made:
        each.close()


class Resizes:
    """Every change of a grant, (model, bytes), and ``hooks`` that are called just before each."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, int]] = []
        self.hooks: list[Callable[[str, int], object]] = []


@pytest.fixture
def resizes(monkeypatch):
    spy, real = Resizes(), Engine.resize

    def resize(engine, grant_bytes):
        for hook in spy.hooks:
            hook(engine._name, grant_bytes)
        spy.changes.append((engine._name, grant_bytes))
        real(engine, grant_bytes)

    monkeypatch.setattr(Engine, "resize", resize)
    return spy


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def budget(toy: ToyMachine, weights_gib: float) -> int:
    cap = hard_cap(toy.machine.physical_bytes)
    return cap - int(weights_gib * GIB) - 3 * GIB


# --- loading -------------------------------------------------------------------------------


def test_a_cold_model_asked_for_by_many_is_loaded_once_and_serves_all(build):
    toy = build()
    name = toy.add("cold", 1)
    toy.family.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(toy.slots.acquire, name) for _ in range(8)]
        assert toy.family.entered.wait(10)
        late = pool.submit(toy.slots.acquire, name)  # in the middle of the load: it waits, it is not refused
        time.sleep(0.05)
        assert not late.done()
        toy.family.gate.set()
        slots = {future.result(20) for future in [*asked, late]}
    assert len(slots) == 1
    assert toy.family.loads == ["cold"]
    (slot,) = slots
    assert slot.pins == 9
    assert list(ask(slot))


def test_when_a_load_fails_all_who_waited_get_the_same_error_and_the_next_tries_again(build):
    toy = build()
    name = toy.add("broken", 1, fault="no such tensor")
    toy.family.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(toy.slots.acquire, name) for _ in range(4)]
        assert toy.family.entered.wait(10)
        wait_for(lambda: not any(future.done() for future in asked))
        toy.family.gate.set()
        errors = {id(future.exception(20)) for future in asked}
    assert len(errors) == 1
    assert toy.family.loads == ["broken"]
    with pytest.raises(RuntimeError, match="no such tensor"):
        toy.slots.acquire(name)
    assert toy.slots.slots() == ()


def test_two_cold_models_never_load_at_the_same_time(build):
    toy = build()
    asked = [toy.add("one", 1), toy.add("two", 1)]
    toy.family.before_return = lambda path: time.sleep(0.05)
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(toy.slots.acquire, name) for name in asked]
        loads += [pool.submit(toy.load, name, 1) for name in ("three", "four")]  # as at the start
        assert [load.result(30).name for load in loads] == ["one", "two", "three", "four"]
    assert sorted(toy.family.loads) == ["four", "one", "three", "two"]
    assert not toy.family.overlapped


def test_a_name_that_nobody_knows_is_not_found_and_a_known_one_is_only_not_ready(build):
    toy = build()
    toy.add("known")
    with pytest.raises(ModelNotFound, match=r"served: known"):
        toy.slots.acquire("unknown")
    with pytest.raises(ModelNotReady):
        toy.slots.get("known")
    with pytest.raises(CheckpointError, match="already"):
        toy.slots.add("known", toy.path("other"))


def test_a_model_that_loads_is_missing_from_what_others_may_reserve_and_the_claim_goes_with_the_load(build):
    toy = build(64)
    toy.load("running", 15)
    name = toy.add("other", 14 / 1.2)
    toy.family.entered.clear()
    toy.family.gate.clear()
    future = toy.slots.load_known(name)
    assert toy.family.entered.wait(10)
    ledger = toy.slots.memory.ledger
    claim = ledger.reservations()["load of other"]
    assert (claim.kind, claim.size_bytes) == ("load", pytest.approx(14 * GIB, rel=1e-6))
    free = hard_cap(64 * GIB) - (15 + 3 + 14) * GIB
    assert not ledger.reserve("kv", free + 2**20, "kv")
    assert ledger.reserve("kv", free - 2**20, "kv")
    ledger.release("kv")
    toy.family.gate.set()
    future.result(20)
    assert "load of other" not in ledger.reservations()


@pytest.mark.parametrize("step", ["weights", "guard", "share", "build", "final guard"])
def test_a_load_that_fails_at_any_step_leaves_nothing_and_the_others_exact_grants(build, resizes, step):
    toy = build(64)
    first = toy.load("first", 10)
    other = toy.load("second", 8, wide=True)
    before = toy.grants()
    table = dict(toy.slots.memory.ledger.reservations())
    config: dict = {"wide": True}
    if step == "weights":
        config["fault"] = "damaged"
    elif step == "build":
        config["fails_on"] = 256  # the warm-up's chunk
    elif step == "guard":
        toy.family.before_return = lambda path: setattr(toy.machine, "used_elsewhere", 40 * GIB)
    elif step == "share":
        config["memory_per_disk_byte"] = 0.8
    else:
        calls: list[str] = []

        def use(name: str, grant: int) -> None:
            calls.append(name)
            if calls.count("third") == 2:  # its engine is built
                toy.machine.used_elsewhere = 45 * GIB

        resizes.hooks.append(use)
    weights_at_restore: list[int] = []
    resizes.hooks.append(
        lambda name, grant: name != "third" and weights_at_restore.append(toy.machine.weights)
    )
    with pytest.raises(Exception) as raised:  # noqa: PT011  # each step has its own
        toy.load("third", 35.2 if step == "share" else 12, **config)
    if step == "share":
        assert isinstance(raised.value, GrantTooSmall)
        assert weights_at_restore == []  # no grant was touched
    elif step in ("guard", "final guard"):
        assert isinstance(raised.value, ModelDoesNotFit)
    gc.collect()
    assert toy.grants() == before
    assert toy.machine.weights == 18 * GIB
    if step in ("build", "final guard"):
        restored = weights_at_restore[-2:]
        assert restored == [18 * GIB, 18 * GIB]  # the newcomer's weights were gone before anybody grew
        assert weights_at_restore[:2] == [30 * GIB, 30 * GIB]  # and were there when they shrank
    assert {key: entry.size_bytes for key, entry in toy.slots.memory.ledger.reservations().items()} == {
        key: entry.size_bytes for key, entry in table.items()
    }
    assert [slot.name for slot in toy.slots.slots()] == ["first", "second"]
    assert toy.states("third")[-1] == "failed"
    assert [slot.state for slot in (first, other)] == ["serving", "serving"]


def test_every_refused_load_is_told_with_its_reason(build):
    toy = build(64, slots={"max_models": 2})
    toy.load("first", 10)
    for name, gib, config, reason in (
        ("no room", 60, {}, "model_does_not_fit"),
        ("no share", 43.5, {"memory_per_disk_byte": 0.8}, "grant_too_small"),
        ("no weights", 1, {"fault": "damaged"}, "internal_error"),
        ("no warm-up", 1, {"fails_on": 256}, "internal_error"),
    ):
        with pytest.raises(Exception):  # noqa: B017, PT011  # each has its own
            toy.load(name, gib, **config)
        told = [event for event in toy.sink.events if event.model == name]
        assert (told[-1].state, told[-1].error_code) == ("failed", reason)
        assert [event.state for event in told].count("failed") == 1
    toy.load("second", 1)
    with pytest.raises(NoSlotFree):
        toy.load("third", 1)
    assert (toy.sink.events[-1].state, toy.sink.events[-1].error_code) == ("failed", "no_slot_free")


def test_a_ledger_that_refuses_everybody_is_told_once_a_minute_with_what_it_holds(build):
    toy = build(64)
    ledger, now = toy.slots.memory.ledger, 1000.0
    ledger._clock = lambda: now
    assert ledger.reserve("nobody's", GIB, "media")
    for _ in range(60):
        now += 15
        assert not ledger.reserve("too much", 100 * GIB, "media")
    stuck = [event for event in toy.sink.events if isinstance(event, LedgerStuck)]
    dropped = [event for event in toy.sink.events if isinstance(event, ReservationDropped)]
    assert len(stuck) == 13
    assert (stuck[0].streak_seconds, stuck[0].reservations, stuck[0].reserved_bytes) == (120.0, 1, GIB)
    assert (stuck[-1].reservations, stuck[-1].used_bytes) == (0, 0)
    assert [(event.kind, event.size_bytes, event.age_seconds > 600) for event in dropped] == [
        ("media", GIB, True)
    ]


def test_samples_say_what_each_slot_does(build):
    toy = build(64, telemetry={"sample_seconds": 0.02})
    slot = toy.load("model", 1)

    def activities():
        return [event.activity for event in toy.sink.events if isinstance(event, EngineSample)]

    wait_for(lambda: "idle" in activities())
    stream = ask(slot, tokens=3000)
    wait_for(lambda: "running" in activities())
    slot.state = "reloading"
    wait_for(lambda: "reloading" in activities())
    slot.state = "serving"
    stream.cancel()
    list(stream)


def test_the_cache_is_cleared_before_anything_is_measured(build, resizes):
    toy = build(64)

    def fill_cache(*_) -> None:
        toy.machine.cached_bytes = 50 * GIB

    def fill_cache_after_warm_up(name: str, grant: int) -> None:
        if "warming" in toy.states(name):
            fill_cache()

    toy.family.before_return = fill_cache
    resizes.hooks.append(fill_cache_after_warm_up)
    assert toy.load("model", 10).state == "serving"
    assert toy.machine.clears >= 2


def test_what_others_have_reserved_counts_after_a_load(build):
    toy = build(64)
    ledger = toy.slots.memory.ledger
    free = hard_cap(64 * GIB) - (10 + 3) * GIB
    toy.add("model", 10, memory_per_disk_byte=0.5)  # more than the gate was told
    assert ledger.reserve("media", free - GIB + 2**20, "media")
    with pytest.raises(ModelDoesNotFit, match="too little to serve"):
        toy.slots.acquire("model")
    assert ledger.resize("media", free - GIB - 2**20)
    assert toy.slots.acquire("model").state == "serving"


def test_activations_that_warm_up_measured_lower_the_budget(build):
    toy = build(64)
    slot = toy.load("model", 10)
    before = toy.slots.memory.budget()
    slot.activation_bytes = 5 * GIB
    assert toy.slots.memory.budget() == before - 2 * GIB


def test_a_model_is_warm_before_it_serves_and_its_load_is_timed_as_a_whole(build):
    toy = build()
    toy.family.gate.clear()
    threading.Timer(0.2, toy.family.gate.set).start()
    slot = toy.load("model", 1)
    assert toy.states("model") == ["loading", "warming", "serving"]
    assert slot.engine.status().choices is not None
    assert 0.2 <= slot.load_seconds < 30
    assert slot.activation_bytes > 0


def test_weights_that_are_replaced_while_they_load_are_refused(build):
    toy = build()

    def replace(path):
        with (path / "model.safetensors").open("ab") as file:
            file.write(b"more")

    toy.family.before_return = replace
    with pytest.raises(CheckpointError, match="changed while they were loaded"):
        toy.load("model", 1)


def test_a_shutdown_while_weights_load_or_an_engine_is_built_leaves_no_slot(build):
    toy = build()
    name = toy.add("model", 1)
    toy.family.gate.clear()
    future = toy.slots.load_known(name)
    assert toy.family.entered.wait(10)
    closing = threading.Thread(target=toy.slots.close)
    closing.start()
    wait_for(lambda: toy.slots._loading._closing)
    toy.family.gate.set()
    closing.join(20)
    assert not closing.is_alive()
    assert isinstance(future.exception(1), Draining)
    assert toy.slots.slots() == ()
    assert toy.states(name) == ["loading", "failed"]  # it was not even warmed up
    with pytest.raises(Draining):
        toy.slots.acquire(name)
    gc.collect()
    assert toy.machine.weights == 0


def test_a_shutdown_while_the_engine_is_built_leaves_no_slot(build, monkeypatch):
    toy = build()
    name = toy.add("model", 1)
    real, started = Engine.start, threading.Event()

    def start(engine, *grants):
        real(engine, *grants)
        started.set()
        wait_for(lambda: toy.slots._loading._closing)

    monkeypatch.setattr(Engine, "start", start)
    future = toy.slots.load_known(name)
    assert started.wait(20)
    toy.slots.close()
    assert isinstance(future.exception(1), Draining)
    assert "serving" not in toy.states(name)


# --- eviction -------------------------------------------------------------------------------


def test_the_one_idle_for_longest_makes_room_and_busy_ones_never(build):
    toy = build(64)
    for name in ("a", "b", "c"):
        toy.load(name, 14)
    busy = toy.slots.acquire("a")
    toy.slots.release(toy.slots.acquire("c"))
    toy.add("d", 14)
    assert toy.slots.acquire("d").name == "d"
    assert [slot.name for slot in toy.slots.slots()] == ["a", "c", "d"]
    assert busy.state == "serving"


def test_a_slot_with_a_running_request_is_not_evicted_though_nobody_pins_it(build):
    toy = build(64)
    slot = toy.load("a", 30)
    toy.add("b", 30)
    stream = ask(slot, tokens=3000)
    with pytest.raises(ModelDoesNotFit):
        toy.slots.acquire("b")
    stream.cancel()
    list(stream)
    toy.slots.acquire("b")
    assert [slot.name for slot in toy.slots.slots()] == ["b"]


def test_without_a_victim_a_load_is_refused_after_one_clearing_of_the_cache(build):
    toy = build(64)
    toy.load("a", 30)
    toy.slots.acquire("a")
    toy.add("b", 30)
    clears = toy.machine.clears
    with pytest.raises(ModelDoesNotFit, match="not free now") as raised:
        toy.slots.acquire("b")
    assert toy.machine.clears == clears + 1
    assert raised.value.status == 503
    assert raised.value.retry_after_seconds > 0
    assert toy.family.loads == ["a"]


def test_memory_that_only_the_cache_held_is_enough(build):
    toy = build(64)
    toy.machine.cached_bytes = 40 * GIB
    assert toy.load("a", 30).state == "serving"


def test_what_is_loaded_at_the_start_evicts_nothing(build):
    toy = build(64)
    toy.load("a", 30)
    with pytest.raises(ModelDoesNotFit):
        toy.load("b", 30)
    assert [slot.name for slot in toy.slots.slots()] == ["a"]
    with pytest.raises(ModelNotFound):
        toy.slots.acquire("b")


def test_the_number_of_slots_is_bounded_and_an_idle_one_makes_place(build):
    toy = build(64, slots={"max_models": 2})
    toy.load("a", 1)
    toy.load("b", 1)
    with pytest.raises(NoSlotFree):
        toy.load("c", 1)
    toy.slots.add("c", toy.folder / "c")
    held = [toy.slots.acquire("a"), toy.slots.acquire("b")]
    with pytest.raises(NoSlotFree):
        toy.slots.acquire("c")
    toy.slots.release(held[0])
    assert toy.slots.acquire("c").name == "c"
    assert [slot.name for slot in toy.slots.slots()] == ["b", "c"]


def test_a_model_that_was_evicted_between_its_load_and_its_use_is_loaded_again(build):
    toy = build()
    name = toy.add("model", 1)
    toy.slots.load_known(name).result(20)
    toy.slots.unload(name)
    slot = toy.slots.acquire(name)
    assert (slot.state, slot.pins) == ("serving", 1)
    assert toy.family.loads == ["model", "model"]


def test_a_pin_and_the_look_up_are_one_step(build):
    toy = build()
    toy.load("model", 1)
    slot = toy.slots.acquire("model")
    assert not toy.slots._evict()
    toy.slots.release(slot)
    assert slot.pins == 0
    assert toy.slots._evict()


# --- unloading ------------------------------------------------------------------------------


def test_unloading_ends_requests_frees_the_weights_and_grows_the_others(build, resizes):
    toy = build(64)
    a, b = toy.load("a", 10), toy.load("b", 8)
    stream = ask(b, tokens=3000)
    alive_at_growth: list[int] = []
    resizes.hooks.append(lambda name, grant: alive_at_growth.append(toy.machine.weights))
    toy.slots.unload("b")
    assert list(stream)[-1].reason == "cancelled"
    assert alive_at_growth == [10 * GIB]
    assert toy.grants() == {"a": budget(toy, 10)}
    assert toy.states("b")[-2:] == ["unloading", "absent"]
    assert a.state == "serving"


def test_unloading_twice_or_nothing_is_a_no_op(build, monkeypatch):
    toy = build()
    toy.load("a", 1)
    real, closing, go_on = Engine.close, threading.Event(), threading.Event()

    def close(engine, *seconds):
        closing.set()
        assert go_on.wait(20)
        return real(engine, *seconds)

    monkeypatch.setattr(Engine, "close", close)
    first = threading.Thread(target=toy.slots.unload, args=("a",))
    first.start()
    assert closing.wait(20)
    toy.slots.unload("a")  # in the middle of the first, and does not wait for it
    assert first.is_alive()
    go_on.set()
    first.join(20)
    toy.slots.unload("a")
    toy.slots.unload("never there")
    assert toy.states("a")[-2:] == ["unloading", "absent"]
    assert toy.states("a").count("absent") == 1


def test_idle_models_are_unloaded_and_come_back_when_asked_for(build):
    toy = build(slots={"idle_seconds": 0.2})
    toy.load("a", 1)
    toy.load("b", 1)
    held = toy.slots.acquire("b")
    wait_for(lambda: [slot.name for slot in toy.slots.slots()] == ["b"])
    time.sleep(0.3)
    assert held.state == "serving"
    assert toy.slots.acquire("a").state == "serving"


def test_a_request_that_came_after_the_look_at_the_clock_is_not_cut_off(build, monkeypatch):
    toy = build(slots={"idle_seconds": 1000.0})
    slot = toy.load("a", 1)
    slot.used_at -= 2000
    real = type(slot).is_idle.fget
    acquired = []

    def is_idle(self):
        idle = real(self)
        if not acquired:  # a request comes right now, from another thread
            thread = threading.Thread(target=lambda: acquired.append(toy.slots.try_acquire("a")))
            thread.start()
            thread.join(0.1)
        return idle

    monkeypatch.setattr(type(slot), "is_idle", property(is_idle))
    toy.slots.unload_idle()
    wait_for(lambda: bool(acquired))
    assert acquired == [None] or acquired[0].state == "serving"


def test_without_an_idle_time_nothing_is_unloaded(build):
    toy = build()
    slot = toy.load("a", 1)
    slot.used_at -= 10**6
    time.sleep(0.1)
    assert slot.state == "serving"


# --- shares ---------------------------------------------------------------------------------


def test_one_model_has_the_whole_budget_and_two_share_it_by_what_their_kv_costs(build):
    toy = build(64)
    narrow = toy.load("narrow", 10)
    assert toy.grants() == {"narrow": budget(toy, 10)}
    wide = toy.load("wide", 8, wide=True)
    shares = kv_grants(budget(toy, 18), [narrow.demand, wide.demand])
    assert toy.grants() == dict(zip(["narrow", "wide"], shares, strict=True))
    assert shares == kv_grants(budget(toy, 18), [KvDemand(128, 4096), KvDemand(256, 4096)])
    toy.slots.unload("wide")
    assert toy.grants() == {"narrow": budget(toy, 10)}


def test_shares_shrink_before_one_grows_and_never_add_up_to_more_than_the_budget(build, resizes):
    toy = build(128)
    memory = toy.slots.memory
    current: dict[str, int] = {}
    largest: list[int] = []

    def check(name: str, grant: int) -> None:
        current[name] = grant
        alive = {slot.name for slot in toy.slots.slots()}
        total = sum(grant for name, grant in current.items() if name in alive)
        largest.append(total)
        assert total <= memory.budget()

    resizes.hooks.append(check)
    for name, gib, wide in (("a", 10, False), ("b", 8, True), ("c", 2, False)):
        toy.load(name, gib, wide=wide)
    toy.slots.unload("b")
    toy.load("d", 20, wide=True)
    toy.slots.unload("a")
    assert len(largest) >= 9


def test_a_share_below_the_minimum_refuses_the_load_and_changes_nothing(build, resizes):
    toy = build(24)
    toy.load("a", 12)
    before, changes = toy.grants(), len(resizes.changes)
    toy.machine.free_bytes = None
    with pytest.raises(GrantTooSmall, match="would be left with"):
        toy.load("b", 2.5, memory_per_disk_byte=0.1, context_tokens=1)
    assert toy.grants() == before
    assert len(resizes.changes) == changes
    assert toy.states("b")[-1] == "failed"


def test_unloading_during_a_load_waits_with_its_growth_and_counts_both(build, resizes):
    toy = build(64)
    toy.load("a", 10)
    toy.load("b", 8)
    name = toy.add("c", 6)
    toy.family.entered.clear()
    toy.family.gate.clear()
    future = toy.slots.load_known(name)
    assert toy.family.entered.wait(10)
    toy.slots.unload("b")
    assert sum(toy.grants().values()) <= budget(toy, 10)
    toy.family.gate.set()
    future.result(20)
    assert sum(toy.grants().values()) <= budget(toy, 16)
    assert toy.grants()["a"] == toy.grants()["c"] == budget(toy, 16) // 2


def test_growth_after_an_unload_parks_while_a_load_divides_and_counts_the_newcomer(build, resizes):
    toy = build(64)
    for name, gib in (("a", 10), ("b", 8)):
        toy.load(name, gib)
    alone, unloading, seen = toy.grants(), [], []

    def unload_now(name: str, grant: int) -> None:
        if grant >= alone["a"] or unloading:
            return
        unloading.append(threading.Thread(target=toy.slots.unload, args=("b",)))
        unloading[0].start()  # the load has begun to divide
        wait_for(lambda: toy.states("b")[-1] == "absent")
        time.sleep(0.05)
        seen.append((unloading[0].is_alive(), len(resizes.changes)))

    before = len(resizes.changes)
    resizes.hooks.append(unload_now)
    toy.load("c", 6)
    unloading[0].join(20)
    assert seen == [(True, before)]  # it waited, and had changed nothing
    assert toy.grants() == {"a": budget(toy, 16) // 2, "c": budget(toy, 16) // 2}
