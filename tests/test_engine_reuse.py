"""Prefix reuse through the engine: what a warm request runs, what it gets, and how much is not computed again.

| promise | test |
|---|---|
| warm runs the rest of the cold list of chunks, keys and masks, and has its bits | ``test_a_warm_request_...`` |
| another member of the numerics id is a miss | ``test_what_was_computed_in_another_way_...`` |
| nothing of the reused prefix is computed again; how much is reused | ``test_a_warm_request_...`` |
| growing conversations in a small budget | ``test_thirty_growing_turns_...`` |
| equal prompts that arrive together | ``test_two_equal_long_prompts_...`` |
| scopes | ``test_scopes_...`` |
| the same text with reuse and without, of real checkpoints | ``test_a_checkpoint_...`` |
| warm and cold rows in one batch | ``test_warm_and_cold_rows_...`` |
| tiers that fail, are slow, or lie | ``test_a_tier_...`` |
| cancelling, evicting, resizing at any moment | ``test_engine_reuse_chaos.py`` |
| memory | ``test_engine_budget.py`` |
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import wait_for
from toy_family import ToyModel, ToySeam, full, recurrent, text_of, toy_picture, window
from warm import BytesTier, NumberCodec, Warm, bits_equal, noise, numerics

from darkbloom_core.contracts import (
    Chat,
    Device,
    MediaSpan,
    Message,
    Placement,
    PreparedPicture,
    Prompt,
    TextPart,
    TierStats,
)
from darkbloom_core.engine import GenerationRequest, _parts, _reuse, _spill
from darkbloom_core.plugins import load_plugins
from darkbloom_core.prefix import block_hashes

LAYERS = [window(300), full(), full(source=1), window(100)]
SMALL = {"q_heads": 1, "kv_heads": 1}


@pytest.fixture(scope="module")
def shared():
    """One engine for all tests that only ask it."""
    with Warm(ToyModel(LAYERS)) as warm:
        yield warm


@pytest.fixture
def opened():
    """Engines that are closed at the end."""
    engines = []

    def make(*given, **named) -> Warm:
        engines.append(Warm(*given, **named))
        return engines[-1]

    yield make
    for each in engines:
        each.engine.close()


# --- exactness ------------------------------------------------------------------------------


@st.composite
def patterns(draw):
    """Every kind of layer: full, windows smaller, equal and larger than a block, sinks, recurrent, borrowing."""
    layers = []
    for index in range(draw(st.integers(1, 4))):
        kinds = [full(), full(sinks=True), recurrent()]
        kinds += [window(size, sinks=sinks) for size in (1, 100, 256, 300, 600) for sinks in (False, True)]
        sources = [at for at in range(index) if layers[at].source is None and not layers[at].state]
        if sources:
            source = draw(st.sampled_from(sources))
            kinds += [full(source=source, window=layers[source].window)] * 4
        layers.append(draw(st.sampled_from(kinds)))
    return layers


@settings(deadline=None, max_examples=4 if os.environ.get("LD_PRELOAD") is None else 12)
@given(
    patterns(),
    st.sampled_from((256, 512)),
    st.integers(0, 2**16),
    st.integers(200, 1300),
    st.integers(1, 300),
)
def test_a_warm_request_runs_the_rest_of_what_a_cold_one_runs_and_has_its_bits(
    layers, grid, seed, length, more
):
    prompt = noise(length, seed)
    grown = [*prompt, *noise(more, seed + 1)]
    with Warm(ToyModel(layers, seed=seed), grid) as warm:
        for ids, common in ((prompt, 0), (prompt, length - 1), (grown, length)):
            ran, cold = warm.run(ids), warm.run_cold(ids)
            assert cold.cached == 0
            assert ran.chunks == [chunk for chunk in cold.chunks if chunk[0] >= ran.cached]
            assert ran.attended == cold.attended[len(cold.attended) - len(ran.attended) :]
            assert ran.cached >= common - grid
            assert ran.tokens == cold.tokens
            assert bits_equal(ran, cold)
        assert warm.is_at_rest()


if sys.platform == "linux":

    @pytest.mark.system
    @pytest.mark.timeout(280)
    def test_the_same_holds_where_openblas_computes():
        command = [
            sys.executable,
            "-m",
            "pytest",
            __file__,
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not system",
        ]
        command += ["-k", "warm_request or checkpoint or prefill_is_cut", "--import-mode=importlib"]
        environment = {**os.environ, "LD_PRELOAD": "libopenblas.so.0", "EXPECT_OPENBLAS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_bits_depend_on_where_prefill_is_cut_if_the_blas_is_a_fast_one(opened):
    """The control: the same prompt in chunks off the grid. Only the reference BLAS gives the same bits for any cut."""
    model, prompt = ToyModel(LAYERS), noise(700)
    on, off = (
        opened(model).run(prompt),
        opened(model, 320, relaxed=True, numerics=numerics(LAYERS, 320)).run(prompt),
    )
    assert on.chunks != off.chunks
    if os.environ.get("EXPECT_OPENBLAS"):
        assert "libopenblas" in Path("/proc/self/maps").read_text()
        assert not bits_equal(on, off)


MEMBERS = {
    "weights": b"x" * 32, "family": "other", "family_version": "2", "mlx_version": "2", "backend": "cuda",
    "device": "other", "kernels": {"blas": "other"},
}  # fmt: skip


def test_what_was_computed_in_another_way_is_not_reused():
    parts: dict = {}
    prompt = noise(600)

    def cached(**changes) -> int:
        with Warm(ToyModel([full()]), numerics=numerics([full()], **changes), open_tiers=tier) as warm:
            ran = warm.run(prompt)
            warm.reuse._spill.wait()
            return ran.cached

    def tier():
        return {"below": BytesTier(parts)}

    assert cached() == 0
    assert cached() == 512
    for name, value in MEMBERS.items():
        assert cached(**{name: value}) == 0, name
        assert cached(**{name: value}) == 512, name
    assert cached() == 512


@pytest.mark.soak
def test_a_checkpoint_says_the_same_with_reuse_and_without():
    for name in load_plugins().checkpoints():
        for warm, (chat, longer) in checkpoint(name):
            warm.run(chat, 1)
            cold, ran = warm.run_cold(longer, 6), warm.run(longer, 6)
            assert ran.cached >= len(chat) - 1 - 256 > 0
            assert ran.tokens == cold.tokens
            assert bits_equal(ran, cold)


def checkpoint(name):
    """An engine of a checkpoint, and token ids of two conversations, the second a longer form of the first."""
    from darkbloom_demo import checked_prompts

    plugins, device = load_plugins(), Device("cpu")
    path = plugins.checkpoints()[name]
    config = json.loads((path / "config.json").read_text())
    family = plugins.family_for(config)
    description = family.describe(config, device)
    codec = family.codec(path, description)
    turns = list(itertools.islice(itertools.cycle(checked_prompts()), 40))
    chats = []
    for count in (13, 15):
        messages = [
            Message(role=role, content=(TextPart(text),))
            for one in turns[:count]
            for role, text in (("user", one.question), ("assistant", one.contains))
        ]
        chats.append(codec.encode_chat(Chat(messages=tuple(messages[:-1]))).ids)
    model = family.load(path, description, Placement(device))
    with Warm(model, codec=NumberCodec(codec.vocab_size)) as warm:
        yield warm, chats


# --- what is kept, and for whom -------------------------------------------------------------


def test_thirty_growing_turns_in_a_budget_for_twelve_window_states_reuse_all_but_a_chunk(opened):
    layers = [window(1024, **SMALL)] * 5 + [full(**SMALL)]
    warm = opened(ToyModel(layers, context_tokens=16_384), ram_bytes=1)
    parts = warm.reuse.layout.of(range(256, 2049, 256))
    state = sum(parts.part_bytes(*one) for one in parts.needs_at(2048))
    turns = np.random.default_rng(30).integers(120, 300, 30)
    blocks = sum(turns) // 256
    full_bytes = blocks * parts.part_bytes(0, "full")
    warm.reuse.budget._most_bytes = max(12 * state, 2 * full_bytes)
    assert warm.reuse.budget.most_bytes == 12 * state
    prompt: list[int] = []
    for turn, more in enumerate(turns):
        before = len(prompt)
        prompt += noise(int(more), turn)
        ran = warm.run(prompt, 1)
        assert ran.cached >= before - 256, turn
    assert warm.status.tiers["ram"].bytes_used <= 12 * state


def test_two_equal_long_prompts_that_arrive_together_are_prefilled_once(opened):
    warm = opened(ToyModel([window(300, **SMALL), full(**SMALL)], context_tokens=16_384))
    prompt = noise(8192)
    warm.run(noise(600, 1))
    before = warm.engine.status().prefill_tokens
    streams = [warm.submit(name, prompt) for name in ("first", "second")]
    ends = [list(stream)[-1] for stream in streams]
    computed = warm.engine.status().prefill_tokens - before
    assert computed == 8192 + 256
    assert sorted(end.usage.cached_tokens for end in ends) == [0, 7936]
    assert warm.status.waits == 1
    first, second = sorted(end.timings.time_to_first_token_seconds for end in ends)
    began = time.monotonic()
    warm.run(prompt, 1)  # an adoption and a chunk
    assert second - first < 2 * (time.monotonic() - began) < first
    assert warm.is_at_rest()


def test_whoever_waits_for_one_that_is_cancelled_computes_it_itself(opened):
    model = ToyModel([window(300), full()])
    warm = opened(model)
    prompt = noise(2000)
    leader, follower = warm.submit("leader", prompt), warm.submit("follower", prompt)
    wait_for(lambda: warm.engine.status().prefill_tokens >= 512)
    leader.cancel()
    *_, end = events = list(follower)
    assert end.reason == "length"
    assert text_of(events) == "".join(chr(32 + token) for token in warm.run_cold(prompt).tokens)
    assert end.usage.cached_tokens < 1792
    assert warm.is_at_rest()


def test_scopes_share_nothing_with_each_other_and_all_with_themselves(shared):
    prompt = noise(600, 7)
    who = [{}, {"scope": "a"}, {"scope": "b"}, {"cache_key": "a"}, {"scope": "a", "cache_key": "a"}]
    assert [shared.run(prompt, 1, **one).cached for one in who] == [0] * 5
    assert [shared.run(prompt, 1, **one).cached for one in who] == [512] * 5


def test_a_thousand_random_scopes_and_prompts_share_no_block(shared):
    chance = random.Random(6)
    prompts = [noise(256 * chance.randint(1, 3), seed) for seed in range(20)]
    names: dict[bytes, tuple] = {}
    for _ in range(1000):
        scope, key = (chance.choice([None, "", chance.randbytes(4).hex(), "x"]) for _ in range(2))
        number = chance.randrange(20)
        asked = GenerationRequest(
            id="r", prompt=Prompt(()), parser=None, max_tokens=1, scope=scope, cache_key=key
        )
        cuts = range(256, len(prompts[number]) + 1, 256)
        for block, name in enumerate(block_hashes(prompts[number], cuts, shared.reuse._root(asked))):
            assert names.setdefault(name, (scope, key, number, block)) == (scope, key, number, block)
    assert len(names) > 1000


def test_a_prompt_with_pictures_shares_only_with_the_same_pictures(opened):
    sees = opened(ToyModel(LAYERS, vision=ToySeam()))
    ids = tuple(noise(600, 9))
    prompt = Prompt(ids, (MediaSpan(100, 50, 0), MediaSpan(400, 50, 1)))
    one, two, three = (toy_picture([number / 8] * 50) for number in range(3))

    def cached(*pictures: PreparedPicture) -> int:
        asked = replace(request_of(ids), prompt=prompt, pictures=pictures)
        return list(sees.engine.submit(asked))[-1].usage.cached_tokens

    assert (cached(one, two), cached(one, two)) == (0, 512)
    assert cached(one, three) == 256
    assert cached(two, one) == 0
    assert sees.run(ids, 1).cached == 0


def request_of(ids) -> GenerationRequest:
    from toy_engine import request

    return request("r", ids, 1)


def test_warm_and_cold_rows_in_one_batch_get_what_they_get_alone(opened):
    warm = opened(ToyModel(LAYERS), engine={"max_rows": 8, "slice_seconds": 60.0})
    prompts = [noise(300 + 90 * number, number) for number in range(8)]
    alone = [warm.run_cold(prompt, 12) for prompt in prompts]
    for prompt in prompts[::2]:
        warm.run(prompt, 1)
    streams = [warm.submit(str(number), prompt, 12) for number, prompt in enumerate(prompts)]
    outputs = [list(stream) for stream in streams]
    assert [text_of(events) for events in outputs] == [
        "".join(chr(32 + token) for token in ran.tokens) for ran in alone
    ]
    assert [events[-1].usage.cached_tokens > 0 for events in outputs] == [True, False] * 4
    assert warm.engine.status().largest_batch > 4


def test_the_measured_cost_of_prefill_is_what_prefill_took(opened):
    warm = opened(ToyModel([full(**SMALL)] * 12))  # so many operations that launching them takes as long
    warm.run(noise(768), 1)
    seconds = warm.run(noise(768, 1), 1).end.timings.prefill_seconds
    measured = 768 * warm.reuse.rates.costs().prefill_milliseconds_per_token / 1000
    assert seconds / 2 < measured < 2 * seconds


def test_short_prompts_are_counted_and_nothing_else(opened):
    warm = opened(ToyModel([full()]))
    warm.run(noise(255), 1)
    assert warm.status.outcomes == {"short": 1}
    assert not warm.reuse._uses


def test_no_reuse_where_the_context_holds_no_chunk_and_a_token():
    with Warm(ToyModel([full()], context_tokens=256)) as warm:
        assert warm.reuse is None
        assert warm.run(noise(20)).cached == 0


# --- tiers below RAM ------------------------------------------------------------------------


@pytest.fixture
def below():
    return BytesTier()


def on_two_engines(opened, below, *prompts, **options):
    """An engine without anything in RAM, over a tier that has what another one computed of ``prompts``."""
    first = opened(ToyModel(LAYERS), open_tiers=lambda: {"below": BytesTier(below.parts)})
    for prompt in prompts:
        first.run(prompt, 1)
    first.reuse._spill.wait()
    return opened(ToyModel(LAYERS), open_tiers=lambda: {"below": below}, **options)


@contextlib.contextmanager
def beside_a_row_that_decodes(warm, below, prompts):
    """The streams of ``prompts``, all of which are found at the tier before it gives anything."""
    decoding = warm.submit("decodes", noise(5), 2000)
    wait_for(lambda: warm.engine.status().output_tokens > 0)
    below.gate.clear()
    streams = [warm.submit(str(number), prompt, 1) for number, prompt in enumerate(prompts)]
    wait_for(lambda: warm.reuse.is_busy)
    yield streams
    decoding.cancel()
    list(decoding)


def test_a_tier_below_outlives_the_engine_and_what_it_gives_is_promoted(opened, below):
    prompt = noise(900)
    warm = on_two_engines(opened, below, prompt)
    cold, ran = warm.run_cold(prompt), warm.run(prompt)
    assert ran.cached == 768
    assert bits_equal(ran, cold)
    fetched = below.fetches
    assert fetched > 0
    again = warm.run(prompt)
    assert again.cached == 768
    assert bits_equal(again, cold)
    assert below.fetches == fetched
    assert warm.is_at_rest()
    assert not warm.engine._share.ledger.reservations().keys() - {"warm/slabs", "warm/prefix cache"}


def test_a_tier_below_hears_what_ram_serves_and_is_given_what_it_would_take(opened, below):
    prompt = noise(900)
    warm = opened(ToyModel(LAYERS), open_tiers=lambda: {"below": below})
    warm.run(prompt, 1)
    warm.reuse._spill.wait()
    held = dict(below.parts)
    below.parts.clear()
    below.told.clear()
    assert warm.run(prompt, 1).cached == 768
    warm.reuse._spill.wait()
    assert below.fetches == 0
    assert below.parts == held
    (told,) = below.told
    blocks = [key.block for key in told if key.part == "full"]
    assert blocks == [key.block for key in held if key.part == "full"]


def test_a_part_whose_bytes_cannot_be_had_is_lost_alone_and_counted(opened, below, monkeypatch, caplog):
    given = []

    def bytes_of(array):
        given.append(array)
        if len(given) <= 2:
            raise MemoryError("no room for a copy")
        return memoryview(array).cast("B")

    monkeypatch.setattr(_spill, "bytes_of", bytes_of)
    warm = opened(ToyModel(LAYERS), open_tiers=lambda: {"below": below})
    warm.run(noise(900), 1)
    warm.reuse._spill.wait()
    assert warm.status.parts_unoffered == 2
    assert caplog.text.count("not offered") == 1
    assert len(below.parts) == len(given) - 2 > 0


def test_parts_that_find_too_many_waiting_are_dropped_and_counted(opened, below, monkeypatch):
    monkeypatch.setattr(_spill, "MOST_BYTES", 0)
    goes_on, offer = threading.Event(), below.offer
    below.offer = lambda key, data: goes_on.wait(10) and offer(key, data)
    warm = opened(ToyModel(LAYERS), open_tiers=lambda: {"below": below})
    below.used = lambda keys: [False] * len(keys)  # which would have them offered again
    warm.run(noise(900), 1)
    assert warm.status.parts_unoffered > 0
    goes_on.set()
    warm.reuse._spill.wait()
    assert len(below.parts) == 1


def test_the_planner_begins_with_what_a_tier_has_measured(opened, below):
    below.stats = lambda: TierStats(read_milliseconds_per_byte=1.0)
    warm = on_two_engines(opened, below, noise(900))
    assert warm.run(noise(900)).cached == 0
    assert warm.status.outcomes == {"cost": 1}


def test_others_may_go_on_between_any_two_copies_of_windows_that_come(opened, below, monkeypatch):
    prompt, steps, evaluated, evaluate = noise(900), [], [], mx.eval
    warm = on_two_engines(opened, below, prompt)

    def adopt(*given):
        evaluated.clear()
        for held in _parts.adopt(*given):
            steps.append((len(held), len(evaluated)))
            yield held
            evaluated.clear()

    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluated.append(arrays) or evaluate(*arrays))
    monkeypatch.setattr(_reuse, "adopt", adopt)
    assert warm.run(prompt).cached == 768
    tails = len(warm.reuse.layout.of([256, 512, 768, 900]).needs_at(768))
    assert tails > 1
    assert steps == [(3, 1), *[(0, 1)] * tails, (tails, 1)]
    steps.clear()
    assert warm.run(prompt).cached == 768
    assert steps == [(3, 1), (tails, 1)], "what RAM holds is not copied"


def test_one_row_is_filled_at_a_time(opened, below, monkeypatch):
    """Between decode steps of another each does one step."""
    asked = [noise(900, seed) for seed in range(4)]
    warm = on_two_engines(opened, below, *asked, engine={"slice_seconds": 1e-9})
    under_way, most = set(), []

    def adopt(*given):
        number = object()
        under_way.add(number)
        for held in _parts.adopt(*given):
            most.append(len(under_way))
            yield held
        under_way.discard(number)

    monkeypatch.setattr(_reuse, "adopt", adopt)
    with beside_a_row_that_decodes(warm, below, asked) as streams:
        below.gate.set()
        for stream in streams:
            assert list(stream)[-1].usage.cached_tokens == 768
    assert len(most) > 4 * 3
    assert set(most) == {1}


@pytest.mark.parametrize("how", ["leaves", "breaks"])
def test_a_request_that_ends_while_its_row_is_filled_lets_the_next_be_filled(opened, below, monkeypatch, how):
    asked = [noise(900, seed) for seed in range(2)]
    warm = on_two_engines(opened, below, *asked, engine={"slice_seconds": 1e-9})
    ends, begun = [], []

    def adopt(*given):
        begun.append(given)
        is_first = len(begun) == 1
        for held in _parts.adopt(*given):
            yield held
            if is_first and how == "breaks":
                raise OSError("no row")
            if is_first:
                ends[0].cancel()

    monkeypatch.setattr(_reuse, "adopt", adopt)
    with beside_a_row_that_decodes(warm, below, asked) as (leaves, stays):
        ends.append(leaves)
        below.gate.set()
        assert list(leaves)[-1].reason == ("cancelled" if how == "leaves" else "error")
        assert list(stays)[-1].usage.cached_tokens == 768
    assert warm.is_at_rest()


def test_what_a_tier_takes_to_begin_counts_as_its_time(opened, below):
    """So do buffers that are made before it is asked."""
    prompt, fetch = noise(900), below.fetch
    warm = on_two_engines(opened, below, prompt)
    below.fetch = lambda fetches: time.sleep(0.05) or fetch(fetches)
    warm.reuse.rates.prefilled(256, 1e6)  # whatever it takes, it pays
    assert warm.run(prompt).cached == 768
    size = sum(map(len, below.parts.values()))
    assert warm.reuse.rates.costs().fetch_milliseconds_per_byte["below"] >= 50 / size


@pytest.mark.parametrize("how", ["raises", "lies", "has lost it"])
def test_a_tier_that_fails_costs_a_hit_and_nothing_else(opened, below, how):
    prompt = noise(900)
    warm = on_two_engines(opened, below, prompt)
    cold = warm.run_cold(prompt)
    if how == "raises":
        below.fault = OSError("gone")
    elif how == "lies":
        below.damaged = True
    else:
        parts, below.parts = below.parts, {}
        below.probe = lambda keys: [len(parts[key]) if key in parts else None for key in keys]
    ran = warm.run(prompt)
    assert ran.cached == 0
    assert bits_equal(ran, cold)
    assert warm.status.outcomes["failed"] == 1
    assert warm.status.faults["below"] == (how == "raises")
    assert warm.run(prompt).cached == 768  # out of RAM
    assert warm.is_at_rest()


def test_a_tier_that_does_not_answer_is_waited_for_no_longer_than_prefill_would_take(opened, below):
    prompt = noise(900)
    warm = on_two_engines(opened, below, prompt)
    below.gate.clear()
    began = time.monotonic()
    ran = warm.run(prompt)
    assert time.monotonic() - began < 5
    assert ran.cached == 0
    below.gate.set()
    wait_for(lambda: "staging/r" not in warm.engine._share.ledger.reservations())


def test_a_request_that_leaves_while_a_tier_fetches_holds_nothing(opened, below):
    prompt = noise(900)
    warm = on_two_engines(opened, below, prompt)
    below.gate.clear()
    stream = warm.submit("leaves", prompt)
    wait_for(lambda: warm.reuse.is_busy)
    stream.cancel()
    assert list(stream)[-1].reason == "cancelled"
    below.gate.set()
    wait_for(warm.is_at_rest)
    wait_for(lambda: "staging/leaves" not in warm.engine._share.ledger.reservations())


def test_a_hit_that_would_not_pay_is_not_taken_and_is_tried_again_some_time(opened):
    warm = opened(ToyModel(LAYERS))
    prompt = noise(600)
    warm.run(prompt, 1)
    rates, layout = warm.reuse.rates, warm.reuse.layout.of([256, 512, 600])
    parts = [*((block, "full") for block in range(2)), *layout.needs_at(512)]
    saved = 512 * rates.costs().prefill_milliseconds_per_token
    rates._fetch["ram"] = 2 * saved / sum(layout.part_bytes(*part) for part in parts)
    declined = next(count for count in range(100) if warm.run(prompt, 1).cached)
    assert warm.status.outcomes["cost"] == declined > 1


# --- relaxed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [{}, {"deterministic": True}, {"chained": True}], ids=str)
def test_relaxed_reuse_takes_the_models_own_answer_up_to_any_block(opened, ways):
    model = ToyModel([window(300), full(), recurrent(), full(source=1)])
    relaxed = opened(model, 512, relaxed=True, engine=ways)
    exact = opened(model, 512, engine=ways)
    prompt = noise(300)
    answer = relaxed.run(prompt, 500).tokens
    assert len(answer) == 500
    question = [*prompt, *answer, *noise(100, 1)]
    warm, cold = relaxed.run(question, 8), exact.run(question, 8)
    assert warm.cached == 768
    assert warm.tokens == cold.tokens
    assert np.allclose(warm.logits, cold.logits, atol=1e-3)
    assert exact.run(question, 8).cached == 512
    assert relaxed.is_at_rest()
