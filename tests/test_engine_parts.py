"""Chunks that go through each layer in parts: what comes out, what runs between two decode steps, and how they end.

Thresholds are lowered, so that short prompts have parts; how many a chunk has is in
``test_engine_scheduler.py``, that nothing is copied in ``test_engine_counted.py``.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from toy_engine import LAYERS, is_empty, request, start, wait_for
from toy_family import ToyModel, full, recurrent, tokens_of, window
from warm import Warm, bits_equal, noise

from darkbloom_core.engine import KvStore, _scheduler
from darkbloom_core.engine._chunk import ChunkBatch


@pytest.fixture
def parts(monkeypatch):
    """Parts begin at ``keys``, and have at least ``least`` tokens."""

    def lower(keys: int, least: int) -> None:
        monkeypatch.setattr(_scheduler, "PART_KEYS", keys)
        monkeypatch.setattr(_scheduler, "PART_WORK", keys * least)
        monkeypatch.setattr(_scheduler, "LEAST_PART_TOKENS", least)
        on_cpu = partial(_scheduler.chunk_parts, on_cpu=True)  # also where there is an accelerator
        monkeypatch.setattr(_scheduler, "chunk_parts", lambda start, end, **_: on_cpu(start, end))

    return lower


EVERY_KIND = [
    [window(20, sinks=True), full(), window(300), full(source=1), recurrent(), window(20, source=0)],
    [recurrent(), window(64), full(sinks=True), window(1), full(source=2), window(64, source=1)],
]


@pytest.mark.parametrize("layers", EVERY_KIND, ids=["windows", "sinks"])
def test_a_prompt_in_parts_gets_what_it_gets_in_whole_chunks(parts, monkeypatch, layers):
    prompt = noise(600)
    with Warm(ToyModel(layers)) as warm:
        parts(256, 32)
        cut = warm.run_cold(prompt)
        monkeypatch.setattr(_scheduler, "chunk_parts", lambda *_, **__: 1)
        whole = warm.run_cold(prompt)
    assert whole.chunks == [(0, 256), (256, 256), (512, 88)]
    assert cut.chunks[:9] == [(0, 256), *((at, 32) for at in range(256, 512, 32))]
    assert cut.chunks[9:] == [(512, 44), (556, 44)]
    assert cut.tokens == whole.tokens
    for one, other in zip(cut.logits, whole.logits, strict=True):
        assert np.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("layers", [EVERY_KIND[0], [window(300), full(), full(source=1), window(20)]])
def test_a_warm_request_runs_the_rest_of_the_parts_of_a_cold_one_and_has_its_bits(parts, layers):
    parts(256, 32)
    prompt = noise(700)
    with Warm(ToyModel(layers)) as warm:
        for ids in (prompt, prompt, [*prompt[:600], *noise(100, 1)]):
            ran, cold = warm.run(ids), warm.run_cold(ids)
            assert len(cold.chunks) > 10
            assert ran.chunks == [part for part in cold.chunks if part[0] >= ran.cached]
            assert ran.attended == cold.attended[len(cold.attended) - len(ran.attended) :]
            assert ran.tokens == cold.tokens
            assert bits_equal(ran, cold)
        assert ran.cached >= 512
        assert warm.is_at_rest()


class Telling(ToyModel):
    """Notes what runs, ``"decode"`` or (layers, tokens), and calls ``at_unit`` before each of the latter."""

    def __post_init__(self):
        super().__post_init__()
        self.events: list = []
        self.at_unit = lambda count: None

    def run_layers(self, inputs, batch, first, last):
        tokens = inputs[0].shape[1]
        self.events.append("decode" if tokens == 1 else (last - first, tokens))
        if tokens > 1:
            self.at_unit(sum(event != "decode" for event in self.events))
        return super().run_layers(inputs, batch, first, last)


@pytest.fixture
def beside(parts):
    """An engine whose slices are as short as they can be, one that decodes in it, and its model."""
    model = Telling(LAYERS)
    engine = start(model, slice_seconds=1e-9, chained=False, compiled=False, packed=False, max_rows=4)
    decoding = engine.submit(request("decoding", [5], 3000))
    next(iter(decoding))
    parts(16, 4)
    model.events.clear()
    yield engine, decoding, model
    engine.close()


LONG = noise(64, 3)


def test_between_two_decode_steps_one_part_of_one_layer_runs(beside):
    engine, decoding, model = beside
    tokens = tokens_of(list(engine.submit(request("long", LONG, 5))))
    events = list(model.events)
    decoding.cancel()
    list(decoding)
    assert tokens == model.greedy(LONG, 5)
    assert "uu" not in "".join("d" if event == "decode" else "u" for event in events)
    units = [event for event in events if event != "decode"]
    assert units == [(1, 16)] * len(LAYERS) + [(1, 4)] * 3 * 4 * len(LAYERS)
    assert engine._loop.runner.part_seconds.of(1, 4, len(LONG)) > 0


@pytest.mark.parametrize("at", [7, 8, 30])
def test_a_request_that_is_cancelled_between_parts_leaves_nothing(beside, at):
    engine, decoding, model = beside
    model.at_unit = lambda count: gone.cancel() if count == at else None
    gone = engine.submit(request("gone", LONG, 5))
    assert list(gone)[-1].reason == "cancelled"
    assert sum(event != "decode" for event in model.events) == at
    assert engine._loop.runner._prefilling is None
    model.at_unit = lambda count: None
    assert tokens_of(list(engine.submit(request("next", LONG[::-1], 5)))) == model.greedy(LONG[::-1], 5)
    decoding.cancel()
    list(decoding)
    wait_for(lambda: is_empty(engine))


def test_a_part_that_raises_fails_its_request_alone(beside):
    engine, decoding, model = beside

    def at_unit(count: int) -> None:
        if count == 9:
            raise RuntimeError("this part fails")

    model.at_unit = at_unit
    assert list(engine.submit(request("bad", LONG, 5)))[-1].reason == "error"
    assert tokens_of(list(engine.submit(request("next", LONG, 5)))) == model.greedy(LONG, 5)
    assert not decoding.ended


def test_a_window_that_nobody_borrows_keeps_nothing_that_it_attended_to():
    """A chunk in many parts would keep a window of each of them in each layer."""
    model = ToyModel([window(8), window(8), window(8, source=1)])
    store = KvStore(model.layers, 1)
    batch = ChunkBatch(store, store.open_row(16, 20), 0, 16)
    model.run_layers(model.embed(mx.zeros((1, 16), mx.int32)), batch, 0, 3)
    assert [batch.caches[index]._seen is None for index in (0, 1)] == [True, False]
