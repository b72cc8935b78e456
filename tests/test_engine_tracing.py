"""Decode steps are compiled without a C++ compiler's help on the CPU backend, and the process's mode is given back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest
from toy_engine import LAYERS, request, start
from toy_family import ToyModel, tokens_of

from darkbloom_core.engine import _tracing
from darkbloom_core.engine._compiled import CompiledDecode
from darkbloom_core.engine._decode import decode_shape, layer_arrays
from darkbloom_core.engine._kv import KvStore
from darkbloom_core.engine._tracing import can_trace_unfused, is_on_cpu, trace_unfused
from darkbloom_core.settings import EngineSettings
from darkbloom_core.slots._engines import engine_options

SUPPORT = Path(__file__).parent / "support"

PROGRAM = """
from pathlib import Path
import tempfile
import mlx.core as mx
from toy_engine import LAYERS, request, start
from toy_family import ToyModel, full

def kernels():
    return len(list(Path(tempfile.gettempdir()).glob("mlx/*/cpu/*")))

def graphs(layers, **options):
    engine = start(ToyModel(layers), compiled=True, **options)
    list(engine.submit(request("one", [1, 2, 3], 60)))
    traces = engine._loop.runner.compiled.traces
    engine.close()
    return traces

found = [graphs(LAYERS), kernels()]
mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + x)(mx.ones(8)))
found.append(kernels())
print(*found, graphs([full()], fused=True), kernels())
"""


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="without g++ MLX compiles nothing on a CPU"
)


@needs_compiler
@pytest.mark.skipif(not is_on_cpu(), reason="accelerators fuse")
def test_compiled_steps_on_the_cpu_run_no_compiler_unless_asked_and_what_others_compile_is_fused(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    graphs, unfused, by_others, fused_graphs, fused = (int(word) for word in done.stdout.split())
    assert graphs > 0
    assert unfused == 0
    assert by_others > 0
    assert fused_graphs > 0
    assert fused > by_others


@needs_compiler
@pytest.mark.skipif(not is_on_cpu(), reason="accelerators are always measured")
@pytest.mark.parametrize("is_there", [True, False])
def test_without_the_mode_decoding_on_the_cpu_is_compiled_only_if_asked(monkeypatch, is_there):
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    if not is_there:
        monkeypatch.setattr(_tracing, "SET_COMPILE_MODE", "no_such_function")
        _tracing._set_mode.cache_clear()
    try:
        assert can_trace_unfused() == is_there
        traced = []
        run = CompiledDecode.run
        monkeypatch.setattr(CompiledDecode, "run", lambda *given: (traced.append(1), run(*given))[1])
        engine = start(ToyModel(LAYERS))
        assert bool(traced) == is_there, "warm-up measures it only where it can be had"
        engine.close()
    finally:
        _tracing._set_mode.cache_clear()


@pytest.mark.parametrize("word", ["auto", "always", "never"])
def test_the_setting_says_whether_steps_are_compiled_and_fused(word):
    options = engine_options(EngineSettings(compile=word))
    assert options.compiled == {"auto": None, "always": True, "never": False}[word]
    assert options.fused == (word == "always")


@needs_compiler
def test_who_switched_compiling_off_keeps_it_off(monkeypatch):
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    assert can_trace_unfused()
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    assert not can_trace_unfused()


def test_without_a_compiler_nothing_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not can_trace_unfused()


def test_a_trace_that_hangs_keeps_no_other_from_ending_and_fusing_is_on_after_the_last(monkeypatch):
    modes, may_end, hangs = [], threading.Event(), threading.Event()
    monkeypatch.setattr(_tracing, "_set_mode", lambda: modes.append)
    stuck = threading.Thread(target=lambda: trace_unfused(lambda: hangs.set() or may_end.wait()))
    stuck.start()
    assert hangs.wait(20)
    assert trace_unfused(lambda: "traced") == "traced"
    assert modes == [_tracing.NO_FUSE] * 2
    may_end.set()
    stuck.join()
    assert modes == [_tracing.NO_FUSE] * 2 + [_tracing.ENABLED]


def test_fusing_is_on_again_also_after_a_fault(monkeypatch):
    modes = []
    monkeypatch.setattr(_tracing, "_set_mode", lambda: modes.append)
    with pytest.raises(ZeroDivisionError):
        trace_unfused(lambda: 1 / (modes != [_tracing.NO_FUSE]))
    assert modes == [_tracing.NO_FUSE, _tracing.ENABLED]


def test_a_trace_that_fails_leaves_no_graph(monkeypatch):
    model, store = ToyModel(LAYERS), KvStore(LAYERS, 1, 64)
    row = store.open_row(1, 64)
    shape, arrays = decode_shape(store, [row], [0], exact=False), layer_arrays(store, [row])
    graphs, given = (
        CompiledDecode(model, unfused=True),
        (mx.array([1], mx.int32), mx.array([0], mx.int32), arrays),
    )
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            graphs.run(shape, *given)
    assert not graphs._graphs
    assert graphs.run(shape, *given).shape[0] == 1


def test_engines_on_several_threads_trace_at_once():
    engines = [start(ToyModel(LAYERS), compiled=True) for _ in range(3)]
    streams = [engine.submit(request("one", [1, 2, 3], 100)) for engine in engines]
    outputs = [tokens_of(list(stream)) for stream in streams]
    assert all(engine._loop.runner.compiled.traces > 1 for engine in engines)
    for engine in engines:
        engine.close()
    assert outputs == [ToyModel(LAYERS).greedy([1, 2, 3], 100)] * 3
