"""Figures of runs that are written down by hand."""

import pytest
from darkbloom_bench._jobs import Trace
from darkbloom_bench._metrics import (
    END_TO_END,
    FIRST_TOKEN,
    GAP_ALONE,
    GAP_LONGEST,
    GAP_MEDIAN,
    GAP_P99,
    PREFILL,
    decode_rate,
    interference,
    percentile,
    rate_between_first_and_last,
    same_rows,
    whole_run,
)


def trace(*times, submitted=None, tokens=None):
    return Trace(0.0, submitted or [0.0] * len(times), [list(row) for row in times], tokens or [])


def test_percentiles_are_values_that_occurred():
    assert percentile([4, 1, 3, 2], 0.5) == 2
    assert percentile([4, 1, 3, 2], 0.99) == 4
    assert percentile([5], 0.5) == 5


def test_decode_is_counted_while_every_row_decodes():
    early = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    late = [3.0, 5.0, 7.0, 9.0]
    # from 3.0 (the last row's first token) to 7.0 (where both have two more): four and two
    assert decode_rate(trace(early, late), 2) == pytest.approx(6 / 4)


def test_rate_between_first_and_last_token():
    assert rate_between_first_and_last(trace([1.0, 2.0], [3.0, 5.0])) == pytest.approx(3 / 4)


def test_a_whole_run_counts_from_the_first_submission():
    figures = whole_run(trace([2.0, 3.0, 5.0], [6.0, 10.0], submitted=[0.0, 2.0]))
    assert figures[END_TO_END] == pytest.approx(5 / 10)
    assert figures[FIRST_TOKEN] == pytest.approx(3000)
    assert figures[GAP_MEDIAN] == pytest.approx(2000)
    assert figures[GAP_P99] == pytest.approx(4000)


def test_interference_counts_the_gaps_that_the_prompt_touches():
    decoding = [1.0, 2.0, 3.0, 6.0, 8.0, 9.0, 10.0]
    prompt = [8.5, 8.6]
    figures = interference(trace(decoding, prompt, submitted=[0.0, 4.5]), 400)
    assert figures[GAP_ALONE] == pytest.approx(1000)
    assert figures[GAP_LONGEST] == pytest.approx(3000)  # from 3 to 6: the prompt came within it
    assert figures[GAP_MEDIAN] == pytest.approx(2000)  # 3, 2 and 1; the gap from 9 to 10 came after
    assert figures[GAP_P99] == pytest.approx(3000)
    assert figures[PREFILL] == pytest.approx(100)


def test_rows_are_the_same_only_in_every_token():
    ours = trace([], [], tokens=[[1, 2], [3, 4]])
    assert same_rows(ours, trace([], [], tokens=[[1, 2], [3, 5]])) == 1
