"""What warm-up chooses and runs, and that every way to run a decode step gives the same tokens."""

from __future__ import annotations

import mlx.core as mx
import pytest
from toy_engine import LAYERS, engines, prompts, request
from toy_family import ToyModel, tokens_of

from darkbloom_core.engine import KvStore, _runner, _warmup
from darkbloom_core.engine._compiled import CompiledDecode
from darkbloom_core.engine._warmup import _beside_the_slab, _check_repeats
from darkbloom_core.errors import SetupError


@pytest.fixture
def build():
    with engines() as begin:
        yield begin


def test_compiled_and_eager_steps_give_the_same_tokens(build):
    outputs = []
    for compiled in (True, False):
        engine = build(compiled=compiled)
        streams = [engine.submit(request(str(n), ids, 90)) for n, ids in enumerate(prompts(8, seed=4))]
        outputs.append([tokens_of(list(stream)) for stream in streams])
        assert engine.status().choices.compiled == compiled
    assert outputs[0] == outputs[1]


def test_steps_of_one_row_and_of_several_are_compiled_apart(build, monkeypatch):
    def several_only(model, store, size, compiled, allowed):
        return size > 1

    monkeypatch.setattr(_warmup, "_choose_compiled", several_only)
    engine = build()
    runner = engine._loop.runner
    list(engine.submit(request("alone", [1, 2, 3], 60)))
    assert runner.compiled.traces == 0
    for stream in [engine.submit(request(str(n), ids, 60)) for n, ids in enumerate(prompts(4, seed=4))]:
        list(stream)
    assert runner.compiled.traces > 0


def test_no_step_of_a_row_alone_depends_on_which_came_before(build, monkeypatch):
    """The first of a shape is no other than those that follow: a repeated request has equal bits."""
    built = []
    engine = build(compiled=True, packed=False)
    decode = _runner.run_decode
    monkeypatch.setattr(_runner, "run_decode", lambda *given: built.append(given[1]) or decode(*given))
    for name in ("first", "second"):
        list(engine.submit(request(name, [1, 2, 3], 150)))
    assert built == []
    assert engine._loop.runner.compiled.traces >= 3


@pytest.mark.parametrize("one_graph_serves_all_lengths", [True, False])
def test_steps_of_several_rows_are_compiled_unasked_only_where_a_graph_serves_all_lengths(
    build, monkeypatch, one_graph_serves_all_lengths
):
    monkeypatch.setattr(
        _warmup, "_best", lambda *ways: [0.0 * way() + place for place, way in enumerate(ways)]
    )
    serves = property(lambda store: one_graph_serves_all_lengths, lambda *_: None)
    monkeypatch.setattr(KvStore, "has_kernel", serves, raising=False)
    choices = build().status().choices
    assert choices.compiled_alone
    assert choices.compiled == one_graph_serves_all_lengths


@pytest.mark.parametrize(
    ("on_cuda", "replayed", "eager", "is_compiled"),
    [
        (False, 0.94, 1.0, True),
        (False, 0.97, 1.0, False),
        (True, 0.97, 1.0, True),
        (True, 1.04, 1.0, True),
        (True, 1.06, 1.0, False),
    ],
)
def test_on_cuda_steps_are_replayed_where_neither_way_is_clearly_faster(
    monkeypatch, on_cuda, replayed, eager, is_compiled
):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: on_cuda)
    monkeypatch.setattr(_warmup, "_best", lambda *_: [replayed, eager])
    assert _warmup._choose_compiled(None, None, 1, None, None) == is_compiled


def test_ways_take_turns_and_the_best_of_each_counts():
    times = {"one": iter([5.0, 0.003, 0.001, *[0.002] * 10]), "other": iter([0.002] * 13)}
    order = []

    def way(name):
        def run():
            order.append(name)
            return next(times[name])

        return run

    assert _warmup._best(way("one"), way("other")) == [5.0, 0.002], "so slow a way is not run again"
    assert _warmup._best(way("one"), way("other")) == [0.001, 0.002]
    assert order == ["one", "other"] * (1 + _warmup.MOST_ROUNDS)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_warm_up_of_a_row_beside_the_slab_leaves_nothing(is_compiled):
    """It runs where a kernel attends for rows of the slab, which is on CUDA alone."""
    model = ToyModel(LAYERS)
    store, graphs = KvStore(LAYERS, 2, 256), CompiledDecode(model, unfused=False) if is_compiled else None
    held = [row for row in (store.open_row(256, 8),) if not row.is_shared]
    assert held, "a prompt as long as the slab has buffers of its own"
    store.close_row(held[0])
    _beside_the_slab(model, store, graphs)
    assert store.open_rows == 0
    assert graphs is None or graphs.traces > 0


def test_a_device_that_computes_differently_each_time_is_refused():
    answers = iter([1.0, 1.01, 1.3])
    _check_repeats(lambda: mx.array([10.0]))
    with pytest.raises(SetupError, match="different results"):
        _check_repeats(lambda: mx.array([next(answers)]))
