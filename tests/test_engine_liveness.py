"""The wedge monitor on a clock that the tests hold."""

from __future__ import annotations

from darkbloom_core.engine._liveness import WedgeMonitor


def hanging(count: int, at: float = 0.0) -> WedgeMonitor:
    monitor = WedgeMonitor()
    for _ in range(count):
        monitor.admitted(at)
    return monitor


def test_three_hanging_for_ten_seconds_with_no_step_are_suspected():
    assert hanging(3).wedge(9.9) == "none"
    assert hanging(3).wedge(10.0) == "suspected"
    assert hanging(2).wedge(100.0) == "none"


def test_one_hanging_for_two_minutes_with_no_step_is_confirmed():
    assert hanging(1).wedge(119.9) == "none"
    assert hanging(1).wedge(120.0) == "confirmed"


def test_steps_that_go_on_are_never_a_wedge():
    monitor = hanging(5)
    for second in range(1, 1000):
        monitor.step_began(second - 0.5)
        monitor.step_ended(second)
        assert monitor.wedge(second + 5) == "none"
    assert monitor.wedge(999 + 10) == "suspected"


def test_one_first_token_clears_all():
    monitor = hanging(3)
    monitor.first_token()
    assert monitor.hanging == 0
    assert monitor.wedge(1000) == "none"


def test_an_end_without_a_token_forgets_the_oldest():
    monitor = hanging(1)
    for at in (5.0, 6.0):
        monitor.admitted(at)
    monitor.ended_without_token()
    assert monitor.hanging == 2
    assert monitor.wedge(20) == "none"
    assert monitor.wedge(126) == "confirmed"


def test_a_step_under_way_for_longer_than_half_a_minute_is_unhealthy_until_it_returns():
    monitor = WedgeMonitor()
    monitor.step_began(0)
    assert monitor.is_healthy(30)
    assert not monitor.is_healthy(30.1)
    monitor.step_ended(31)
    assert monitor.is_healthy(100)
