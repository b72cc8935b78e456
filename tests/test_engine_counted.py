"""What the engine says of its steps, counted: waits, the order of building and reading, copies, faults, pauses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy

import mlx.core as mx
import numpy as np
import pytest
from toy_engine import engines, is_empty, request, wait_for
from toy_family import ToyCodec, ToyModel, full, recurrent, tokens_of, window

from darkbloom_core.engine import Engine, _runner, _scheduler
from darkbloom_core.engine._kv import KvPair
from darkbloom_core.errors import GenerationFailed

LAYERS = [window(8, sinks=True), full(), window(16), full(source=1)]
WAITS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__array__")
"""Methods of an array that wait until it is computed."""


class Noted:
    """What happens on the engine's thread, in order, while ``noting``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.noting = False
        self.events: list[str] = []
        monkeypatch.setattr(mx, "eval", self._noting("wait", mx.eval))
        monkeypatch.setattr(mx, "async_eval", self._noting("launch", mx.async_eval))
        monkeypatch.setattr(mx, "synchronize", self._noting("synchronize", mx.synchronize))
        for name in WAITS:
            word = "read" if name == "tolist" else name
            monkeypatch.setattr(mx.array, name, self._noting(word, getattr(mx.array, name)))

    def note(self, event: str) -> None:
        if self.noting and threading.current_thread().name.startswith("engine"):
            self.events.append(event)

    def _noting(self, word: str, call: Callable) -> Callable:
        def noted(*given, **named):
            self.note(word)
            return call(*given, **named)

        return noted


class FailingModel(ToyModel):
    """``fails_at`` says which step raises: the shape of its tokens, and its number, from 0, among those of its shape."""

    fails_at: tuple[tuple[int, int], int] | None = None

    def embed(self, ids, media=None):
        count = self.embeds.count(tuple(ids.shape))
        inputs = super().embed(ids, media)
        if (ids.shape, count) == self.fails_at:
            raise RuntimeError("this step fails")
        return inputs


class NotedCodec(ToyCodec):
    """Tells ``noted`` of each token that is delivered."""

    noted: Noted | None = None

    def token_bytes(self, token):
        if self.noted is not None:
            self.noted.note("deliver")
        return super().token_bytes(token)


@pytest.fixture
def build():
    with engines() as begin:
        yield begin


def before_each_decode_step(engine: Engine, monkeypatch: pytest.MonkeyPatch, tell: Callable[[int], None]):
    """``tell`` hears how many rows a step is to have, whether it is built anew or a graph is replayed."""
    runner = engine._loop.runner
    decode = runner._decode_logits

    def told(rows, *given):
        tell(len(rows))
        return decode(rows, *given)

    monkeypatch.setattr(runner, "_decode_logits", told)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_decode_step_waits_once_and_the_next_is_built_and_launched_before_its_tokens_are_delivered(
    build, monkeypatch, compiled, chained, rows
):
    codec, noted, steps = NotedCodec(), Noted(monkeypatch), []
    engine = build(ToyModel(LAYERS), codec=codec, chained=chained, compiled=compiled, packed=False)
    codec.noted = noted

    def step(of_rows: int) -> None:
        if of_rows == rows:
            steps.append(rows)
            noted.noting = 20 < len(steps) <= 120
            noted.note("build")

    before_each_decode_step(engine, monkeypatch, step)
    streams = [engine.submit(request(str(n), [n + 1, 2, 3], 150)) for n in range(rows)]
    for stream in streams:
        assert list(stream)[-1].usage.completion_tokens == 150
    step = ["build", "launch", "wait", "read"] if chained else ["build", "wait", "launch", "read"]
    assert noted.events == (step + ["deliver"] * rows) * 100


class Pointing(ToyModel):
    """Notes at the head of each step where everything is that the rows' KV and states are kept in."""

    places: dict[object, tuple[object, set[int]]] | None = None

    def embed(self, ids, media=None):
        if ids.shape[1] > 1:
            self.look()
        return super().embed(ids, media)

    def look(self) -> None:
        """Not while a graph is traced: what is evaluated then is held by the trace."""
        if self.places is None:
            return
        mx.synchronize()  # or to look would itself be what holds an array
        store = self.engine._loop.store
        own = [pair for row in store._rows for pair in (row.buffers or {}).values()]
        for pair in [*(pair for pair in store.slabs if pair is not None), *own]:
            self._note(pair, pair.k, pair.v)
        for layer, states in enumerate(store.states):
            for number, state in enumerate(states):
                self._note((layer, number), state)

    def _note(self, owner: object, *arrays: mx.array) -> None:
        key = owner if isinstance(owner, tuple) else id(owner)
        if key not in self.places:
            self.places[key] = (owner, set())  # it may be new, and then this step is to fill it
            return
        for array in arrays:
            self.places[key][1].add(np.array(array, copy=False).__array_interface__["data"][0])

    def moved(self) -> int:
        """How many arrays have been at more places than one."""
        return sum(
            len(places) > (2 if isinstance(owner, KvPair) else 1) for owner, places in self.places.values()
        )


def point(engine: Engine, model: Pointing, monkeypatch: pytest.MonkeyPatch) -> None:
    model.engine, model.places = engine, {}
    before_each_decode_step(engine, monkeypatch, lambda _: model.look())


def play_joins_and_leaves(engine: Engine, model: Pointing, monkeypatch: pytest.MonkeyPatch) -> None:
    point(engine, model, monkeypatch)
    streams = [engine.submit(request(str(n), [n + 1] * (n + 7), 60)) for n in range(2)]
    for stream in streams:
        next(iter(stream))
    streams += [engine.submit(request(str(n), [n] * (n * 7), 5 * n)) for n in range(2, 7)]
    streams[4].cancel()
    for stream in streams:
        list(stream)
    model.engine = None


@pytest.mark.parametrize("grant", [1 << 25, 1 << 20], ids=["slab", "own buffers"])
@pytest.mark.parametrize("ways", [{}, {"deterministic": True}, {"packed": True}, {"compiled": True}], ids=str)
def test_no_kv_and_no_state_is_copied_when_rows_join_and_leave(build, monkeypatch, ways, grant):
    """An array that somebody holds is copied whole by the next write to it, and is at another place then."""
    layers = [window(8), full(), window(8, source=0), full(source=1)]
    model = Pointing(layers if "packed" in ways else [*layers, recurrent()])
    options = {"chained": False, "compiled": False, "slice_seconds": 1e-9, "max_rows": 4, **ways}
    engine = build(model, grant=grant, **options)
    assert bool(engine._loop.store.shared_tokens) == (grant > 1 << 20)
    play_joins_and_leaves(engine, model, monkeypatch)
    assert len(model.places) >= 2
    compiled = engine._loop.runner.compiled
    assert (compiled is not None and compiled.traces > 5) == ("compiled" in ways)
    assert model.moved() == 0


@pytest.mark.parametrize("grant", [1 << 25, 1 << 20], ids=["slab", "own buffers"])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_kv_and_no_state_is_copied_where_a_chunk_goes_in_parts(build, monkeypatch, compiled, grant):
    monkeypatch.setattr(_scheduler, "chunk_parts", lambda start, end, on_cpu: 4 if end - start > 4 else 1)
    model = Pointing([window(8), full(), window(8, source=0), full(source=1), recurrent(), window(3)])
    engine = build(model, grant=grant, chained=False, compiled=compiled, max_rows=4)
    play_joins_and_leaves(engine, model, monkeypatch)
    assert model.moved() == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_row_that_outgrows_the_shared_slab_copies_nothing_but_itself(build, monkeypatch, compiled):
    wide = full(
        q_heads=8, kv_heads=8, k_dim=128, v_dim=128
    )  # so that to read a row takes longer than to build a step
    model = Pointing([window(8), wide])
    engine = build(model, grant=100 << 20, chained=False, compiled=compiled, max_rows=2)
    assert engine._loop.store.shared_tokens == 512
    beside = engine.submit(request("beside", [1], 100))
    next(iter(beside))
    point(engine, model, monkeypatch)
    list(engine.submit(request("grows", [2] * 500, 30)))
    list(beside)
    assert model.moved() == 0


def test_an_array_that_somebody_holds_is_copied_by_the_next_write(build, monkeypatch):
    """The control."""

    class Holding(Pointing):
        def run_layers(self, inputs, batch, first, last):
            self.held = copy(self.engine._loop.store.slabs[0].k) if self.places is not None else None
            return super().run_layers(inputs, batch, first, last)

    model = Holding([window(8), full()])
    engine = build(model, grant=1 << 25, chained=False, compiled=False, max_rows=4)
    play_joins_and_leaves(engine, model, monkeypatch)
    assert model.moved() > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_is_waited_for_by_what_no_later_step_writes_to(build, monkeypatch, compiled):
    """Else the wait for a slice of a prefill would run the decode step that was built after it."""
    waited, own = [], []  # kept, so that none gets the id of another

    class Watched:
        def __getattr__(self, name):
            return getattr(mx, name)

        def eval(self, arrays):
            store = engine._loop.store
            own.extend(one for pair in store.slabs if pair is not None for one in (pair.k, pair.v))
            own.extend(one for states in store.states for one in states)
            waited.extend(arrays)
            mx.eval(arrays)

    model = ToyModel([window(8), full(), recurrent()])
    engine = build(model, chained=False, compiled=compiled, slice_seconds=1e-9)
    monkeypatch.setattr(_runner, "mx", Watched())
    for stream in [engine.submit(request(str(n), [n] * 40, 30)) for n in range(3)]:
        list(stream)
    assert len(waited) > 50
    assert not set(map(id, waited)) & set(map(id, own))


def test_beside_a_stalled_reader_others_get_a_token_each_step(build):
    model = ToyModel(LAYERS)
    engine = build(model, event_buffer=32, chained=False, packed=False)
    stalled = engine.submit(request("stalled", [1, 2, 3], 90))
    wait_for(lambda: stalled.is_full)
    others = [engine.submit(request(str(n), [n + 4], 25)) for n in range(2)]
    produced = engine.status().output_tokens
    before = engine.status().decode_steps
    for n, other in enumerate(others):
        assert tokens_of(list(other)) == model.greedy([n + 4], 25)
    assert engine.status().decode_steps - before <= 25 + 4
    assert engine.status().output_tokens - produced <= 2 * 25 + 1
    assert tokens_of(list(stalled)) == model.greedy([1, 2, 3], 90)


def test_a_decode_step_that_raises_fails_its_rows_and_neither_who_waits_nor_who_comes_later(build):
    model = FailingModel(LAYERS)
    engine = build(model, max_rows=2, chained=False, compiled=False, packed=False)
    model.embeds.clear()
    model.fails_at = ((2, 1), 20)
    failing = [engine.submit(request(str(n), [n + 1, 2], 100)) for n in range(2)]
    waiting = engine.submit(request("waiting", [7, 8], 10))
    ends = [list(stream)[-1] for stream in failing]
    assert [type(end.error) for end in ends] == [GenerationFailed] * 2
    assert all(0 < end.usage.completion_tokens < 100 for end in ends)
    assert tokens_of(list(waiting)) == model.greedy([7, 8], 10)
    assert tokens_of(list(engine.submit(request("later", [5], 10)))) == model.greedy([5], 10)
    wait_for(lambda: is_empty(engine))


def test_a_chunk_that_raises_fails_its_row_and_not_those_that_decode(build):
    model = FailingModel(LAYERS)
    engine = build(model, chained=False, packed=False, slice_seconds=1e-9)
    model.embeds.clear()
    model.fails_at = ((1, 14), 0)
    decoding = [engine.submit(request(str(n), [n + 1], 40)) for n in range(2)]
    bad = list(engine.submit(request("bad", [3] * 30, 10)))[-1]
    assert isinstance(bad.error, GenerationFailed)
    for n, stream in enumerate(decoding):
        assert tokens_of(list(stream)) == model.greedy([n + 1], 40)
    wait_for(lambda: is_empty(engine))
