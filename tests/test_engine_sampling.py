"""Sampling: exact arg-max, filters against a plain NumPy reading of their definitions, draws that know no neighbour."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darkbloom_core.engine import SamplingParams
from darkbloom_core.engine._sampling import SampledRow, Sampler, uniform

VOCABULARY = 50


def row(seed=0, choice=0, prompt=(1,), tokens=(), **params) -> SampledRow:
    return SampledRow(SamplingParams(**params), seed, choice, tuple(prompt), list(tokens))


def sample(rows, logits, steps=None) -> list[int]:
    sampler = Sampler(rows, logits.shape[1], None)
    tokens, _ = sampler.sample(mx.array(logits), steps or [0] * len(rows))
    return tokens.tolist()


def logits_of(seed: int, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCABULARY)).astype(np.float32)


def allowed(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """The tokens that temperature, top-k, top-p and min-p leave, from their definitions."""
    scaled = logits / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    order = np.argsort(-weights)
    kept, total = set(), 0.0
    for rank, token in enumerate(order):
        if rank > 0 and (
            (params.top_k and rank >= params.top_k)
            or total >= params.top_p
            or weights[token] < params.min_p * weights[order[0]]
        ):
            break
        kept.add(int(token))
        total += weights[token]
    return kept


@given(seed=st.integers(0, 2**16), temperature=st.sampled_from([0.0, 1e-300, 1e-42, 1e-6]))
@settings(max_examples=40, deadline=None)
def test_temperature_zero_or_next_to_it_is_the_arg_max_even_beside_rows_that_are_drawn(seed, temperature):
    logits = logits_of(seed, 2)
    greedy, _ = sample([row(temperature=temperature), row(temperature=1.0)], logits)
    assert greedy == int(logits[0].argmax())
    assert sample([row(temperature=temperature)], logits[:1]) == [greedy]


@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_only_tokens_that_the_filters_leave_are_drawn_and_all_of_them_are(params):
    logits = logits_of(3)
    one = row(temperature=2.0, **params)
    drawn = {sample([row(seed=seed, temperature=2.0, **params)], logits)[0] for seed in range(300)}
    assert drawn == allowed(logits[0], one.params)


def test_draws_follow_the_distribution():
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    drawn = [sample([row(seed=seed)], logits)[0] for seed in range(2000)]
    shares = np.bincount(drawn, minlength=3) / 2000
    assert np.abs(shares - [0.5, 0.3, 0.2]).max() < 0.04


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.5]),
        "top_k": st.integers(1, VOCABULARY),
        "top_p": st.floats(0.1, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-0.5, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-9, 9), max_size=3),
        "tokens": st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
        "logprobs": st.integers(0, 3),
    },
)


@given(
    seed=st.integers(0, 2**62),
    choice=st.integers(0, 9),
    step=st.integers(0, 5000),
    mine=PARAMS,
    others=st.lists(PARAMS, min_size=1, max_size=3),
    place=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_a_draw_depends_on_the_row_its_seed_choice_and_step_alone(seed, choice, step, mine, others, place):
    logits = logits_of(7, 1 + len(others))
    one = row(seed=seed, choice=choice, **mine)
    alone = sample([one], logits[:1], [step])
    rows = [row(seed=number, **params) for number, params in enumerate(others)]
    place = min(place, len(rows))
    together = sample(
        [*rows[:place], one, *rows[place:]],
        np.insert(logits[1:], place, logits[0], axis=0),
        [*range(place), step, *range(place, len(rows))],
    )
    assert together[place] == alone[0]


def test_the_uniform_number_is_pinned():
    assert uniform(42, 0, 0) == uniform(42, 0, 0)
    assert len({uniform(42, 0, 0), uniform(42, 0, 1), uniform(42, 1, 0), uniform(43, 0, 0)}) == 4
    numbers = [uniform(0, 0, step) for step in range(4000)]
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.02
    assert uniform(42, 0, 7) == 0.7744508385658264


def test_logit_bias_forces_and_forbids():
    logits = logits_of(5)
    best = int(logits[0].argmax())
    assert sample([row(temperature=0.0, logit_bias={9: 100.0})], logits) == [9]
    assert sample([row(temperature=0.0, logit_bias={best: -100.0})], logits) != [best]


def test_penalties_are_their_definitions():
    logits = np.zeros((1, VOCABULARY), np.float32)
    logits[0, :4] = [4.0, 3.9, 3.8, -1.0]
    assert sample([row(temperature=0.0, repetition_penalty=1.1, prompt=[0])], logits) == [1]
    assert sample([row(temperature=0.0, presence_penalty=0.15, tokens=[0])], logits) == [1]
    assert sample([row(temperature=0.0, presence_penalty=0.15, prompt=[0])], logits) == [0]
    assert sample([row(temperature=0.0, frequency_penalty=0.06, tokens=[0, 0, 0, 1])], logits) == [1]
    assert sample([row(temperature=0.0, frequency_penalty=0.06, tokens=[0])], logits) == [0]


def test_penalties_count_a_token_that_was_launched_but_not_read():
    logits = np.zeros((1, VOCABULARY), np.float32)
    logits[0, :2] = [1.0, 0.9]
    sampler = Sampler([row(temperature=0.0, presence_penalty=0.5)], VOCABULARY, mx.array([0]))
    assert sampler.sample(mx.array(logits), [1])[0].tolist() == [1]
    assert sampler.sample(mx.array(logits), [2])[0].tolist() == [0]


def test_logprobs_are_of_the_raw_distribution_and_sorted():
    logits = logits_of(11, 2)
    rows = [row(temperature=0.0, logit_bias={3: 50.0}, logprobs=4), row(temperature=0.0)]
    sampler = Sampler(rows, VOCABULARY, None)
    tokens, arrays = sampler.sample(mx.array(logits), [0, 0])
    read = tuple(array.tolist() for array in arrays)
    (first,) = sampler.read_logprobs(0, tokens.tolist()[0], read)
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert first.token == 3
    assert first.logprob == pytest.approx(expected[3], abs=1e-5)
    assert [token for token, _ in first.top] == np.argsort(-logits[0])[:4].tolist()
    assert [value for _, value in first.top] == pytest.approx(np.sort(expected)[::-1][:4], abs=1e-5)
    assert sampler.read_logprobs(1, tokens.tolist()[1], read) == ()


def test_logprobs_without_alternatives():
    sampler = Sampler([row(temperature=0.0, logprobs=0)], VOCABULARY, None)
    tokens, arrays = sampler.sample(mx.array(logits_of(2)), [0])
    (only,) = sampler.read_logprobs(0, tokens.tolist()[0], tuple(array.tolist() for array in arrays))
    assert only.top == ()
    assert only.logprob < 0
