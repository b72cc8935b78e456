"""A run is followed the same way for both sides: who comes when, and when it is over."""

import itertools

from darkbloom_bench._jobs import Arrival, Job, Recorder


def recorder(job):
    """With a clock that moves by a second each time it is read."""
    return Recorder(job, itertools.count().__next__)


def arrival(max_tokens=2, after_tokens=0):
    return Arrival((1, 2, 3), max_tokens, after_tokens)


def test_rows_without_a_wait_are_due_together_and_once():
    run = recorder(Job((arrival(), arrival())))
    assert list(run.take_due()) == [0, 1]
    assert list(run.take_due()) == []


def test_a_run_is_over_when_every_row_has_ended():
    run = recorder(Job((arrival(1), arrival(2))))
    run.take_due()
    assert not run.token(0, 7)
    assert not run.token(1, 8)
    assert run.token(1, 9)
    assert run.is_over
    assert run.trace.tokens == [[7], [8, 9]]


def test_times_are_those_of_the_clock():
    run = recorder(Job((arrival(),)))
    run.take_due()
    run.token(0, 7)
    run.token(0, 8)
    assert (run.trace.started, run.trace.submitted, run.trace.times) == (0, [1], [[2, 3]])


def test_a_row_comes_once_the_run_has_produced_enough():
    run = recorder(Job((arrival(9), arrival(9, after_tokens=2), arrival(9, after_tokens=3))))
    assert list(run.take_due()) == [0]
    assert not run.token(0, 1)
    assert run.token(0, 1)
    assert list(run.take_due()) == [1]
    assert run.token(1, 1)
    assert list(run.take_due()) == [2]


def test_a_row_comes_at_once_if_none_is_live():
    run = recorder(Job((arrival(1), arrival(1, after_tokens=1000))))
    assert list(run.take_due()) == [0]
    assert run.token(0, 1)
    assert list(run.take_due()) == [1]


def test_a_held_run_is_over_when_every_row_has_enough_since_the_last_began():
    run = recorder(Job((arrival(100), arrival(100)), hold_tokens=2))
    run.take_due()
    for _ in range(10):
        assert not run.token(0, 1)
    assert not run.token(1, 1)
    assert not run.token(0, 1)
    assert not run.token(0, 1)
    assert not run.token(1, 1)
    assert run.token(1, 1)
    assert run.is_over
    assert run.ended_early is None


def test_a_held_run_in_which_a_row_ends_too_early_says_which():
    run = recorder(Job((arrival(2), arrival(100)), hold_tokens=2))
    run.take_due()
    run.token(0, 1)
    assert run.token(0, 1)
    assert run.is_over
    assert run.ended_early == 0
