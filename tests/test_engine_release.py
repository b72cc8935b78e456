"""What a request held is free the moment it is over: nothing waits for the garbage collector.

The grant is too small for a shared slab, so that every row has buffers of its own.
"""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import psutil
import pytest
from toy_engine import is_empty, request, start, wait_for
from toy_family import ToyCodec, ToyModel, full, window

from darkbloom_core.engine import Engine, EngineOptions, _streams
from darkbloom_core.errors import CapacityExhausted

GRANT = 1 << 21
MODES = {
    "default": {},
    "chained": {"chained": True},
    "packed": {"packed": True, "slice_seconds": 1e-9},
    "deterministic": {"deterministic": True, "max_rows": 3},
}


@pytest.fixture(params=MODES)
def engine(request):
    engine = start(
        ToyModel([window(8, sinks=True), full(), window(16), full(source=1)]),
        grant=GRANT,
        **MODES[request.param],
    )
    gc.collect()
    gc.disable()
    yield engine
    gc.enable()
    engine.close()


def play(engine, repeat: int) -> list[weakref.ref]:
    """Long prompts, short ones that may be packed, and some of each cancelled before or in their prefill."""
    lengths = [300, 3, 4, 5, 6, 200, 7]
    asked = [request(f"{repeat} {n}", [n] * length, 12) for n, length in enumerate(lengths)]
    streams = [engine.submit(each) for each in asked]
    for stream in streams[4:]:
        stream.cancel()
    for stream in streams:
        list(stream)
    wait_for(lambda: is_empty(engine) and engine._loop.runner.is_idle)
    return [weakref.ref(each.parser) for each in asked]


def test_kv_memory_is_free_when_its_row_is(engine):
    play(engine, 0)
    before = mx.get_active_memory()
    for repeat in range(1, 4):
        play(engine, repeat)
        wait_for(lambda: mx.get_active_memory() < before + 10_000)  # the long rows alone have 90,000


def test_a_request_is_forgotten_when_its_reader_drops_it(engine):
    parsers = play(engine, 0)
    wait_for(lambda: not any(parser() for parser in parsers))


def test_a_step_leaves_no_cycles_behind(engine):
    play(engine, 0)
    gc.collect()
    play(engine, 1)
    assert gc.collect() == 0


def test_a_failed_step_keeps_nothing_even_if_its_log_record_is_kept(caplog):
    engine = start(ToyModel([full()], fail_on=13), grant=GRANT)
    gc.disable()
    try:
        asked = request("a", [1] * 29)
        parser = weakref.ref(asked.parser)
        assert list(engine.submit(asked))[-1].reason == "error"
        del asked
        wait_for(lambda: parser() is None)
        assert "this length fails" in caplog.text
    finally:
        gc.enable()
        engine.close()


def threads() -> int:
    return psutil.Process().num_threads()


def loads_and_fails() -> None:
    engine = Engine("toy", ToyCodec(), lambda: 1 / 0, EngineOptions())
    with pytest.raises(ZeroDivisionError):
        engine.load_model()


def warms_up_and_fails() -> None:
    with pytest.raises(RuntimeError, match="this length fails"):
        start(ToyModel([full()], fail_on=16))


def gets_too_little() -> None:
    with pytest.raises(CapacityExhausted):
        start(ToyModel([window(8)]), grant=1)


def is_closed_before_it_starts() -> None:
    model = ToyModel([full()])
    engine = Engine("toy", ToyCodec(), lambda: model, EngineOptions())
    engine.load_model()
    engine.close()


def serves() -> None:
    engine = start(ToyModel([full()]), grant=GRANT)
    list(engine.submit(request("a", [1, 2, 3], 3)))
    engine.close()


@pytest.mark.parametrize(
    "life", [loads_and_fails, warms_up_and_fails, gets_too_little, is_closed_before_it_starts, serves]
)
def test_an_engine_leaves_no_thread_and_gives_its_stream_to_the_next(life):
    life()
    before, free = threads(), list(_streams._free)
    for _ in range(3):
        life()
    assert sorted(map(str, _streams._free)) == sorted(map(str, free))  # once each
    wait_for(lambda: threads() <= before)


def test_engines_at_the_same_time_have_streams_of_their_own():
    engines = [start(ToyModel([full()]), grant=GRANT) for _ in range(3)]
    free = list(map(str, _streams._free))
    for engine in engines:
        engine.close()
    given = list(map(str, _streams._free))
    assert len(given) == len(set(given)) == len(free) + 3


def test_an_engine_that_gets_no_stream_says_so(monkeypatch):
    def none(device):
        raise RuntimeError("no thread can be started")

    monkeypatch.setattr(_streams, "_free", [])
    monkeypatch.setattr(mx, "new_thread_unsafe_stream", none)
    engine = Engine("toy", ToyCodec(), lambda: ToyModel([full()]), EngineOptions())
    with pytest.raises(RuntimeError, match="no thread can be started"):
        engine.load_model()
    assert not engine.alive


def test_a_stream_whose_work_did_not_end_well_is_not_used_again(monkeypatch):
    serves()
    free = list(_streams._free)
    engine = start(ToyModel([full()]), grant=GRANT)

    def fails():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(mx, "synchronize", fails)
    assert engine.close()
    assert len(_streams._free) == len(free) - 1
