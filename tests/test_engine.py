"""The engine as its callers see it, with tiny models of every kind of layer and the oracle beside it."""

from __future__ import annotations

import threading
import time

import pytest
from toy_engine import GREEDY, LAYERS, engines, is_empty, prompts, request, wait_for
from toy_family import ToyCodec, ToyModel, full, text_of, tokens_of, window

from darkbloom_core.contracts import Prompt
from darkbloom_core.engine import (
    Engine,
    EngineOptions,
    GenerationRequest,
    OutputEnd,
    PlainParser,
    SamplingParams,
    lane_bytes,
    row_bytes,
)
from darkbloom_core.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    InvalidRequest,
    NeverFits,
    QueueFull,
)


@pytest.fixture
def build():
    with engines() as begin:
        yield begin


def test_many_at_once_each_get_what_they_get_alone(build):
    model = ToyModel(LAYERS, stop_ids=frozenset({5}))
    engine = build(model)
    streams = [engine.submit(request(str(n), ids)) for n, ids in enumerate(prompts(20))]
    for ids, stream in zip(prompts(20), streams, strict=True):
        events = list(stream)
        expected = model.greedy(ids, 20)
        assert tokens_of(events) == expected
        assert events[-1].reason == ("stop" if expected[-1] == 5 else "length")
        assert events[-1].usage.completion_tokens == len(expected)
        assert sum(isinstance(event, OutputEnd) for event in events) == 1
    assert engine.status().largest_batch == 8
    wait_for(lambda: is_empty(engine))


def test_seeded_sampling_is_the_same_beside_any_neighbours(build):
    engine = build()
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=42)
    alone = tokens_of(engine.submit(request("alone", [1, 2, 3], 24, sampling)))
    streams = [engine.submit(request(str(n), ids, 30)) for n, ids in enumerate(prompts(5))]
    streams.append(engine.submit(request("again", [1, 2, 3], 24, sampling)))
    assert tokens_of(list(streams[-1])) == alone
    for stream in streams[:-1]:
        list(stream)
    other = engine.submit(request("other", [1, 2, 3], 24, sampling, choice=1))
    assert tokens_of(list(other)) != alone


@pytest.mark.parametrize("packed", [True, False])
def test_short_prompts_get_the_same_tokens_packed_or_one_by_one(build, packed):
    model = ToyModel([window(8, sinks=True), full(), window(16), full(source=1), window(8, source=0)])
    engine = build(model, packed=packed)
    first = engine.submit(request("running", [1], 300))
    wait_for(lambda: engine.status().running == 1)
    model.embeds.clear()
    ids = [[n] * (n + 2) for n in range(7)]
    streams = [engine.submit(request(str(n), one, 40)) for n, one in enumerate(ids)]
    for one, stream in zip(ids, streams, strict=True):
        assert tokens_of(list(stream)) == model.greedy(one, 40)
    assert any(shape[0] > 1 and shape[1] > 1 for shape in model.embeds) == packed
    first.cancel()
    list(first)


def test_cancelling_one_of_a_pack_leaves_the_others_and_its_lane_clean(build):
    layers = [window(8), full(), window(16)] * 4
    model = ToyModel(layers)
    engine = build(model, packed=True, slice_seconds=1e-9)
    running = engine.submit(request("running", [1], 2000))
    wait_for(lambda: engine.status().running == 1)
    for attempt in range(2):
        streams = [engine.submit(request(f"{attempt} {n}", [n, 2, 3], 20)) for n in range(4)]
        streams[attempt % 4].cancel()
        fresh = engine.submit(request(f"{attempt} fresh", [9, 8, 7], 20))
        for n, stream in enumerate(streams):
            if n != attempt % 4:
                assert tokens_of(list(stream)) == model.greedy([n, 2, 3], 20)
        assert tokens_of(list(fresh)) == model.greedy([9, 8, 7], 20)
        list(streams[attempt % 4])
    running.cancel()
    list(running)


def test_chained_steps_give_the_same_tokens(build):
    model = ToyModel(LAYERS)
    engine = build(model, chained=True)
    streams = [engine.submit(request(str(n), ids, 40)) for n, ids in enumerate(prompts(8))]
    for ids, stream in zip(prompts(8), streams, strict=True):
        assert tokens_of(list(stream)) == model.greedy(ids, 40)


def test_deterministic_mode_gives_the_tokens_of_the_oracle_too(build):
    model = ToyModel(LAYERS)
    engine = build(model, deterministic=True, max_rows=4)
    assert engine.status().choices.fixed_size >= 4
    streams = [engine.submit(request(str(n), ids, 40)) for n, ids in enumerate(prompts(8))]
    for ids, stream in zip(prompts(8), streams, strict=True):
        assert tokens_of(list(stream)) == model.greedy(ids, 40)


@pytest.mark.parametrize("state", ["waiting", "paused"])
def test_a_request_that_does_not_get_on_ends_and_one_that_does_may_take_longer(build, state):
    engine = build(max_rows=1, event_buffer=4, progress_seconds=0.5)
    if state == "paused":
        stuck = engine.submit(request("stuck", [1], 500))
        wait_for(lambda: stuck.is_full)
        time.sleep(0.6)
    else:
        runs = engine.submit(request("runs", [1], 4000 - 2))
        stuck = engine.submit(request("stuck", [1], 5))
        reader = iter(runs)
        began = time.monotonic()
        while time.monotonic() - began < 1.0:
            next(reader)
        runs.cancel()
    end = list(stuck)[-1]
    assert isinstance(end.error, DeadlineExceeded)
    assert state in end.error.message
    if state == "waiting":
        assert list(reader)[-1].reason == "cancelled"
    wait_for(lambda: is_empty(engine))


def test_penalties_see_tokens_that_were_launched_but_not_read(build):
    engine = build()
    sampling = SamplingParams(temperature=0.0, presence_penalty=1000.0)
    tokens = tokens_of(list(engine.submit(request("a", [1, 2, 3], 40, sampling))))
    assert len(tokens) == len(set(tokens)) == 40


def test_one_token_is_one_token(build):
    model = ToyModel(LAYERS)
    events = list(build(model).submit(request("a", [1, 2, 3], 1)))
    assert tokens_of(events) == model.greedy([1, 2, 3], 1)
    assert events[-1].reason == "length"


def test_a_stop_string_ends_the_output_and_frees_the_row(build):
    model = ToyModel(LAYERS)
    engine = build(model)
    text = "".join(chr(32 + token) for token in model.greedy([1, 2, 3], 20))
    stop = text[5:8]
    events = list(engine.submit(request("a", [1, 2, 3], 20, stop=(stop,))))
    assert text_of(events) == text[: text.index(stop)]
    assert (events[-1].reason, events[-1].stop_string) == ("stop", stop)
    wait_for(lambda: is_empty(engine))


def test_text_that_was_held_back_comes_before_the_end(build):
    model = ToyModel(LAYERS)
    text = "".join(chr(32 + token) for token in model.greedy([1, 2, 3], 10))
    events = list(build(model).submit(request("a", [1, 2, 3], 10, stop=(text[-1] + "never",))))
    assert text_of(events) == text
    assert [event for event in events if isinstance(event, OutputEnd)] == events[-1:]
    assert events[-1].reason == "length"


@pytest.mark.parametrize("moment", ["queued", "prefill", "decode", "paused"])
def test_cancelling_ends_the_stream_once_and_gives_everything_back(build, moment):
    engine = build(max_rows=1, event_buffer=4)
    if moment == "queued":
        blocker = engine.submit(request("blocker", [1], 500))
        stream = engine.submit(request("a", [1, 2, 3], 500))
        wait_for(lambda: engine.status().waiting == 1)
    else:
        blocker = None
        stream = engine.submit(request("a", [1] * (3000 if moment == "prefill" else 3), 500))
    if moment == "decode":
        iter_once = iter(stream)
        next(iter_once)
    if moment == "paused":
        wait_for(lambda: stream.is_full)
        steps = engine.status().decode_steps
        time.sleep(0.1)
        assert engine.status().decode_steps <= steps + 2
    stream.cancel()
    stream.cancel()
    assert list(stream)[-1].reason == "cancelled"
    if blocker is not None:
        blocker.cancel()
        list(blocker)
    wait_for(lambda: is_empty(engine))


def test_a_slow_reader_loses_nothing_and_slows_nobody(build):
    model = ToyModel(LAYERS)
    engine = build(model, event_buffer=4)
    slow = engine.submit(request("slow", [1, 2, 3], 60))
    fast = engine.submit(request("fast", [4, 5, 6], 60))
    assert tokens_of(list(fast)) == model.greedy([4, 5, 6], 60)
    assert engine.status().running == 1
    assert tokens_of(list(slow)) == model.greedy([1, 2, 3], 60)


def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on(build):
    model = ToyModel(LAYERS, fail_on=13)
    engine = build(model)
    ids = [1, 2, 3]
    good = engine.submit(request("good", ids, 20))
    bad = engine.submit(request("bad", [1] * 13, 20))
    end = list(bad)[-1]
    assert end.reason == "error"
    assert isinstance(end.error, GenerationFailed)
    assert "this length fails" not in end.error.message
    assert tokens_of(list(good)) == ToyModel(LAYERS).greedy(ids, 20)
    wait_for(lambda: is_empty(engine))
    assert tokens_of(list(engine.submit(request("after", ids, 5)))) == ToyModel(LAYERS).greedy(ids, 5)


class Breaks(PlainParser):
    def text(self, text):
        raise ZeroDivisionError("secret text")


def test_a_parser_that_raises_fails_its_own_request_alone(build):
    model = ToyModel(LAYERS)
    engine = build(model)
    good = engine.submit(request("good", [1, 2, 3], 30))
    bad = engine.submit(
        GenerationRequest(id="bad", prompt=Prompt((1, 2)), parser=Breaks(), max_tokens=9, sampling=GREEDY)
    )
    end = list(bad)[-1]
    assert isinstance(end.error, GenerationFailed)
    assert "secret" not in end.error.message
    assert tokens_of(list(good)) == model.greedy([1, 2, 3], 30)
    wait_for(lambda: is_empty(engine))


def test_a_request_that_a_shrunk_grant_cannot_hold_waits_without_burning_the_processor(build):
    model = ToyModel(LAYERS)
    engine = build(model, grant=grant_for(256, 2), max_rows=1)
    engine.resize(lane_bytes(LAYERS) + row_bytes(LAYERS, 256))
    first = engine.submit(request("first", [1], 200))
    second = engine.submit(request("second", [2], 20))
    wait_for(lambda: engine.status().running == 1)
    engine.resize(0)
    list(first)
    wait_for(lambda: engine.status().running == 0)
    time.sleep(0.05)
    steps = engine.status().steps
    time.sleep(0.1)
    assert engine.status().steps == steps
    assert engine.status().waiting == 1
    engine.resize(grant_for(256, 2))
    assert tokens_of(list(second)) == model.greedy([2], 20)


BAD = {
    "max_tokens 0": ({"most": 0}, InvalidRequest, "max_tokens must be at least 1, not 0"),
    "negative max_tokens": ({"most": -5}, InvalidRequest, "max_tokens must be at least 1, not -5"),
    "empty prompt": ({"ids": []}, InvalidRequest, "empty"),
    "id out of the vocabulary": ({"ids": [64]}, InvalidRequest, "outside 0 to 63"),
    "negative id": ({"ids": [-1]}, InvalidRequest, "outside 0 to 63"),
    "NaN temperature": (
        {"sampling": SamplingParams(temperature=float("nan"))},
        InvalidRequest,
        "temperature",
    ),
    "negative temperature": ({"sampling": SamplingParams(temperature=-1)}, InvalidRequest, "temperature"),
    "top_p 0": ({"sampling": SamplingParams(top_p=0.0)}, InvalidRequest, "top_p"),
    "top_p 2": ({"sampling": SamplingParams(top_p=2.0)}, InvalidRequest, "top_p"),
    "min_p 2": ({"sampling": SamplingParams(min_p=2.0)}, InvalidRequest, "min_p"),
    "top_k -1": ({"sampling": SamplingParams(top_k=-1)}, InvalidRequest, "top_k"),
    "bias outside": ({"sampling": SamplingParams(logit_bias={99: 1.0})}, InvalidRequest, "logit_bias"),
    "infinite bias": (
        {"sampling": SamplingParams(logit_bias={1: float("inf")})},
        InvalidRequest,
        "logit_bias",
    ),
    "21 logprobs": ({"sampling": SamplingParams(logprobs=21)}, InvalidRequest, "top_logprobs"),
    "a million stop strings": ({"stop": ("x",) * 1_000_000}, InvalidRequest, "stop strings"),
    "an empty stop string": ({"stop": ("",)}, InvalidRequest, "stop string"),
    "longer than the context": ({"ids": [1] * 4090}, ContextLengthExceeded, "4090 tokens .* 20 exceed"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_with_their_own_error_and_reserve_nothing(build, case):
    changes, error, message = BAD[case]
    engine = build()
    with pytest.raises(error, match=message):
        engine.submit(request("bad", **{"ids": [1, 2, 3], **changes}))
    assert is_empty(engine)


def test_a_live_id_is_refused_and_may_be_used_again_afterwards(build):
    engine = build()
    first = engine.submit(request("same", [1, 2, 3], 200))
    wait_for(lambda: engine.status().running == 1)
    reserved = engine.status().kv_bytes_reserved
    with pytest.raises(InvalidRequest, match="running already"):
        engine.submit(request("same", [1, 2, 3]))
    assert engine.status().kv_bytes_reserved == reserved
    assert engine.status().waiting == 0
    first.cancel()
    assert list(first)[-1].reason == "cancelled"
    assert list(engine.submit(request("same", [1, 2, 3], 2)))[-1].reason == "length"


def test_the_queue_is_bounded(build):
    engine = build(max_rows=1, waiting_limit=2)
    streams = [engine.submit(request(str(n), [1], 500)) for n in range(3)]
    with pytest.raises(QueueFull):
        engine.submit(request("one too many", [1]))
    for stream in streams:
        stream.cancel()
        list(stream)


def grant_for(tokens: int, rows: int = 1) -> int:
    return lane_bytes(LAYERS) + rows * row_bytes(LAYERS, tokens)


def test_what_can_never_fit_is_told_so_and_what_fits_later_is_told_to_come_back(build):
    engine = build(grant=grant_for(1024), max_rows=1)
    list(engine.submit(request("fits", [1] * 1000, 24)))
    with pytest.raises(NeverFits, match="at most"):
        engine.submit(request("never", [1] * 1000, 25))
    engine.resize(grant_for(512))
    with pytest.raises(CapacityExhausted, match="at present"):
        engine.submit(request("later", [1] * 1000, 24))
    engine.resize(grant_for(1024))
    list(engine.submit(request("now", [1] * 1000, 24)))


def test_shrinking_a_grant_leaves_running_requests_alone(build):
    model = ToyModel(LAYERS)
    engine = build(model, grant=grant_for(256, 4), max_rows=1)
    stream = engine.submit(request("a", [1, 2, 3], 100))
    wait_for(lambda: engine.status().running == 1)
    engine.resize(0)
    assert tokens_of(list(stream)) == model.greedy([1, 2, 3], 100)
    assert engine.status().kv_bytes_reserved == engine.status().kv_bytes_used


def test_requests_that_do_not_fit_together_run_one_after_the_other(build):
    model = ToyModel(LAYERS)
    engine = build(model, grant=2 * lane_bytes(LAYERS) + row_bytes(LAYERS, 256), max_rows=2)
    streams = [engine.submit(request(str(n), [n], 30)) for n in range(3)]
    for number, stream in enumerate(streams):
        assert tokens_of(list(stream)) == model.greedy([number], 30)
    assert engine.status().largest_batch == 1


def test_a_grant_too_small_for_one_row_is_refused_at_the_start():
    engine = Engine("toy", ToyCodec(), lambda: ToyModel(LAYERS), EngineOptions())
    engine.load_model()
    with pytest.raises(CapacityExhausted, match="one row"):
        engine.start(10)
    engine.close()


def test_a_load_that_raises_is_told_to_the_loader_and_ends_the_thread():
    def load():
        raise ValueError("no weights")

    engine = Engine("toy", ToyCodec(), load, EngineOptions())
    with pytest.raises(ValueError, match="no weights"):
        engine.load_model()
    engine.close()
    assert not any(thread.name == "engine toy" for thread in threading.enumerate())


def test_closing_ends_every_stream_and_a_drained_engine_takes_nothing_new(build):
    engine = build(max_rows=1)
    streams = [engine.submit(request(str(n), [1], 2000)) for n in range(3)]
    engine.drain()
    with pytest.raises(Draining):
        engine.submit(request("late", [1]))
    engine.close()
    assert [list(stream)[-1].reason for stream in streams] == ["cancelled"] * 3
    assert engine.status().kv_bytes_used == 0


def test_a_chunk_has_the_same_shapes_whether_the_engine_is_idle_or_full(build):
    ids = list(range(40))
    shapes = []
    for neighbours in (0, 3):
        model = ToyModel(LAYERS)
        engine = build(model, slice_seconds=1e-9)
        model.embeds.clear()
        streams = [engine.submit(request(str(n), [n], 400)) for n in range(neighbours)]
        wait_for(lambda engine=engine, count=neighbours: engine.status().running == count)
        list(engine.submit(request("a", ids, 2)))
        shapes.append([shape for shape in model.embeds if shape[1] > 1])
        for stream in streams:
            stream.cancel()
            list(stream)
    assert shapes[0] == shapes[1] == [(1, 16), (1, 16), (1, 8)]
