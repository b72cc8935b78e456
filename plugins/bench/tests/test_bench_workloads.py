"""What each workload asks for."""

import pytest
from darkbloom_bench._workloads import Sizes, workload

from darkbloom_core.errors import SettingsError

SIZES = Sizes(vocab_size=50, new_tokens=16, long_prompt_tokens=600, churn_requests=24)
NAMES = ("solo", "uniform", "mixed", "short", "churn", "interference", "rows-1", "rows-32", "rows-4x8192")


def lengths(name):
    chosen = workload(name, SIZES)
    return [len(arrival.prompt) for arrival in chosen.job(chosen.runs[0], 1).arrivals]


def test_prompts_are_as_long_as_the_name_says():
    assert lengths("solo") == [100]
    assert lengths("rows-4") == [100] * 4
    assert lengths("rows-4x8192") == [8192] * 4
    assert lengths("uniform") == [300] * 8
    assert (min(lengths("mixed")), max(lengths("mixed")), len(lengths("mixed"))) == (64, 2048, 8)
    assert lengths("short") == [32] * 8
    assert lengths("interference") == [100] * 4 + [600]


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_one_job_and_another_seed_other_prompts(name):
    chosen = workload(name, SIZES)
    for run in chosen.runs:
        assert chosen.job(run, 3) == chosen.job(run, 3)
        assert chosen.job(run, 3).arrivals[0].prompt != chosen.job(run, 4).arrivals[0].prompt


@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_longer_than_the_workload_says(name):
    chosen = workload(name, SIZES)
    for run in chosen.runs:
        for seed in range(20):
            for arrival in chosen.job(run, seed).arrivals:
                assert len(arrival.prompt) + arrival.max_tokens <= chosen.longest_tokens
                assert all(0 <= token < 50 for token in arrival.prompt)


def test_the_runs_of_one_workload_share_no_prompt():
    chosen = workload("rows-8", SIZES)
    held, whole = (chosen.job(run, 1).arrivals[0].prompt for run in chosen.runs)
    assert held != whole


def test_churn_arrivals_come_one_after_the_other_and_have_many_lengths():
    chosen = workload("churn", SIZES)
    arrivals = chosen.job(chosen.runs[0], 1).arrivals
    times = [arrival.after_tokens for arrival in arrivals]
    assert times == sorted(times)
    assert times[:6] == [0] * 6
    assert times[-1] > 0
    assert len({arrival.max_tokens for arrival in arrivals}) > 5


def test_the_long_prompt_comes_while_the_others_decode():
    chosen = workload("interference", SIZES)
    *short, long = chosen.job(chosen.runs[0], 1).arrivals
    assert long.after_tokens > len(short)
    assert all(arrival.max_tokens > long.after_tokens for arrival in short)


@pytest.mark.parametrize("name", ["sol", "rows-0", "rows-", "rows-4x0", ""])
def test_an_unknown_name_is_refused_with_the_names_that_there_are(name):
    with pytest.raises(SettingsError, match=r"solo, uniform, mixed"):
        workload(name, SIZES)
