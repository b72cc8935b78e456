"""Our engine and mlx-lm run the same jobs, and produce the same tokens from the same weights."""

import itertools

import pytest
from darkbloom_bench._jobs import Arrival, Job
from darkbloom_bench._measure import measure
from darkbloom_bench._metrics import SAME_TOKENS
from darkbloom_bench._subject import Subject, longest, opened
from darkbloom_bench._workloads import Sizes, workload
from toy_family import VOCABULARY

from darkbloom_core.engine import EngineOptions
from darkbloom_core.errors import GenerationFailed, SettingsError, UnsupportedCheckpoint

SIZES = Sizes(VOCABULARY, new_tokens=6, long_prompt_tokens=300, churn_requests=10)
OPTIONS = EngineOptions(max_rows=8, chunk_tokens=64)


@pytest.fixture
def sides(toy_subject):
    with opened(toy_subject(), OPTIONS, 3000, compare=True) as both:
        yield both


@pytest.mark.parametrize("name", ["rows-3x70", "churn"])
def test_both_sides_produce_the_same_tokens(sides, name):
    chosen = workload(name, SIZES)
    cells = measure(chosen, *sides, 1, lambda text: None, lambda: None)
    (same,) = [cell for cell in cells if cell.metric == SAME_TOKENS.name]
    requests = len(chosen.job(chosen.runs[-1], 0).arrivals)
    assert (same.ours, same.peer) == (requests, requests)
    assert all(cell.ours > 0 and cell.peer > 0 and cell.ratio > 0 for cell in cells)


def test_interference_has_a_figure_for_each_question(sides):
    cells = measure(workload("interference", SIZES), *sides, 1, lambda text: None, lambda: None)
    assert {cell.metric for cell in cells} == {
        "inter-token p50",
        "inter-token p99",
        "inter-token longest",
        "inter-token p50 alone",
        "prefill",
    }
    assert all(cell.peer > 0 for cell in cells)


def test_each_side_gives_every_row_all_its_tokens(sides):
    job = Job((Arrival((1, 2, 3), 5), Arrival((4, 5), 7), Arrival((6,), 1, after_tokens=3)))
    for side in sides:
        trace = side.run(job)
        assert [len(tokens) for tokens in trace.tokens] == [5, 7, 1]
        for at, times in zip(trace.submitted, trace.times, strict=True):
            assert all(before <= after for before, after in itertools.pairwise([at, *times]))


def test_nothing_goes_on_after_a_held_run(sides):
    ours, _ = sides
    ours.run(Job((Arrival((1, 2, 3), 2000),), hold_tokens=3))
    status = ours._engine.status()
    assert (status.running, status.waiting) == (0, 0)
    assert status.output_tokens < 1000


def test_a_step_that_fails_fails_the_run(toy_subject):
    with (
        opened(toy_subject(fail_on=3), OPTIONS, 100, compare=False) as (ours, _),
        pytest.raises(GenerationFailed),
    ):
        ours.run(Job((Arrival((1, 2, 3), 4),)))


def test_a_model_that_offers_no_peer_is_refused_with_the_family_named(toy_subject):
    subject = toy_subject()
    bare = type(subject.load()).__mro__[1]
    plain = Subject("toy", subject.description, lambda: bare(subject.load().layers))
    with (
        pytest.raises(UnsupportedCheckpoint, match=r"family toy offers no model of mlx-lm"),
        opened(plain, OPTIONS, 100, compare=True),
    ):
        pass


def test_workloads_longer_than_the_context_are_refused(toy_subject):
    description = toy_subject().description
    assert longest([100, 200], description) == 200
    with pytest.raises(SettingsError, match=r"5000 tokens of context; the model has 4096"):
        longest([100, 5000], description)
