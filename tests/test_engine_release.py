"""What a request held is free the moment it is over: nothing waits for the garbage collector.

The grant is too small for a shared slab, so that every row has buffers of its own.
"""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import pytest
from toy_engine import is_empty, request, start, wait_for
from toy_family import ToyModel, full, window

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
