"""Threads that outlive their engines, since MLX on CUDA may not have one end while another engine works."""

import threading
import time
import weakref

import mlx.core as mx
import pytest
from toy_engine import engines, request, wait_for
from toy_family import ToyModel, full, tokens_of

from darkbloom_core.engine import _threads
from darkbloom_core.engine._streams import own_stream
from darkbloom_core.engine._threads import AT_REST, EngineThread


def run(target, name="engine test") -> EngineThread:
    thread = EngineThread(target, name)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return thread


def test_the_next_engine_has_the_thread_of_the_last():
    seen = []
    for number in range(3):
        run(lambda: seen.append((threading.get_ident(), threading.current_thread().name)), f"engine {number}")
    assert len({ident for ident, _ in seen}) == 1
    assert [name for _, name in seen] == ["engine 0", "engine 1", "engine 2"]
    (resting,) = (thread for thread in threading.enumerate() if thread.ident == seen[0][0])
    assert resting.name == AT_REST
    assert resting.daemon


def test_engines_at_once_have_threads_of_their_own():
    together, idents = threading.Barrier(3), set()

    def work():
        idents.add(threading.get_ident())
        together.wait(10)

    for _ in range(2):
        threads = [EngineThread(work, f"engine {number}") for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(idents) == 3


def test_a_thread_is_alive_while_its_target_runs_and_is_waited_for_no_longer_than_asked():
    goes_on = threading.Event()
    thread = EngineThread(goes_on.wait, "engine test")
    assert not thread.is_alive()
    thread.start()
    assert thread.is_alive()
    began = time.monotonic()
    thread.join(0.05)
    assert 0.04 < time.monotonic() - began < 5
    assert thread.is_alive()
    goes_on.set()
    thread.join()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="once"):
        thread.start()


def test_a_thread_at_rest_keeps_nothing_of_its_engine():
    class Held:
        def main(self):
            pass

    held = Held()
    seen = weakref.ref(held)
    thread = run(held.main)
    del held
    wait_for(lambda: seen() is None)
    assert not thread.is_alive()


def test_a_target_that_raises_is_logged_and_its_thread_used_again(caplog):
    idents = []

    def raises():
        idents.append(threading.get_ident())
        raise SystemExit

    run(raises)
    run(lambda: idents.append(threading.get_ident()))
    assert idents[0] == idents[1]
    assert "an engine's thread raised" in caplog.text


def test_an_engine_on_a_thread_that_another_left_serves_as_on_a_new_one():
    model = ToyModel([full()])
    answers = []
    for _ in range(3):
        with engines() as build:
            answers.append(tokens_of(list(build(model).submit(request("a", [1, 2, 3], 12)))))
        assert _threads._resting
    assert answers == [model.greedy([1, 2, 3], 12)] * 3


def test_a_reused_thread_gets_a_new_stream_of_the_accelerator(monkeypatch):
    """MLX's own of a thread is gone once the thread's streams were cleared."""
    made, chosen = [], []

    class Accelerator:
        type = mx.gpu

    monkeypatch.setattr(mx, "default_device", Accelerator)
    monkeypatch.setattr(mx, "new_stream", lambda device: made.append(device.type) or f"stream {len(made)}")
    monkeypatch.setattr(mx, "set_default_stream", chosen.append)
    for _ in range(2):
        with own_stream():
            pass
    assert made == [mx.gpu, mx.gpu]
    assert [one for one in chosen if isinstance(one, str)] == ["stream 1", "stream 2"]
