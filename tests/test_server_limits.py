"""What one API key may ask for, with a clock of the test's own."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from darkbloom_core.errors import ConcurrencyLimitExceeded, RateLimitExceeded
from darkbloom_core.server import RequestContext
from darkbloom_core.server._gate import Gate
from darkbloom_core.server._keys import KeyRing
from darkbloom_core.server._limits import KeyLimits, TokenBucket
from darkbloom_core.server._pages import Pages
from darkbloom_core.settings import ApiKey, ServerSettings

pauses = st.lists(st.floats(0, 5) | st.just(0.0), min_size=1, max_size=30)


@given(pauses, st.integers(1, 5), st.floats(0.01, 10))
def test_a_bucket_gives_no_more_than_its_burst_and_its_rate_over_any_time(steps, burst, per_second):
    bucket, now, taken = TokenBucket(burst, per_second, 0.0), 0.0, []
    for pause in steps:
        now += pause
        if bucket.take(now) == 0:
            taken.append(now)
    for first, begin in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + (taken[last] - begin) * per_second + 1e-6


@given(pauses, st.integers(1, 5), st.floats(0.01, 10))
def test_whoever_waits_as_long_as_told_gets_a_token(steps, burst, per_second):
    bucket, now = TokenBucket(burst, per_second, 0.0), 0.0
    for pause in steps:
        now += pause
        wait = bucket.take(now)
        if wait > 0:
            assert bucket.take(now + wait / 2) > 0
            now += wait + 1e-6
            assert bucket.take(now) == 0


def test_a_clock_that_goes_back_gives_nothing():
    bucket = TokenBucket(1, 1.0, 100.0)
    assert bucket.take(100.0) == 0
    assert bucket.take(50.0) == 1
    assert bucket.take(100.5) == pytest.approx(0.5)
    assert bucket.take(101.0) == 0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def limits(clock=None, **settings):
    return KeyLimits(ServerSettings(**settings), clock or Clock())


def test_a_key_may_ask_in_a_burst_and_then_at_its_rate():
    clock = Clock()
    limited = limits(clock, key_requests_per_minute=6, key_burst=2)
    for _ in range(2):
        limited.enter("alice")
        limited.leave("alice")
    with pytest.raises(RateLimitExceeded, match="6 times a minute") as refused:
        limited.enter("alice")
    assert refused.value.retry_after_seconds == 10
    limited.enter("bob")
    clock.now = 9.5
    with pytest.raises(RateLimitExceeded) as refused:
        limited.enter("alice")
    assert refused.value.retry_after_seconds == 1
    clock.now = 10.0
    limited.enter("alice")
    assert (limited.running("alice"), limited.running("bob")) == (1, 1)


def test_a_key_may_have_so_many_requests_at_once():
    limited = limits(key_concurrency=2)
    limited.enter("alice")
    limited.enter("alice")
    with pytest.raises(ConcurrencyLimitExceeded, match="2 requests"):
        limited.enter("alice")
    limited.enter("bob")
    limited.leave("alice")
    limited.enter("alice")
    assert limited.running("alice") == 2


def test_what_is_refused_for_the_number_does_not_count_for_the_rate():
    limited = limits(key_concurrency=1, key_requests_per_minute=1, key_burst=2)
    limited.enter("alice")
    for _ in range(5):
        with pytest.raises(ConcurrencyLimitExceeded):
            limited.enter("alice")
    limited.leave("alice")
    limited.enter("alice")


def test_without_settings_there_is_no_limit():
    limited = limits()
    for _ in range(1000):
        limited.enter("alice")


@pytest.mark.parametrize("ends", ["well", "with an error", "unanswered"])
def test_a_request_counts_until_its_answer_is_complete_and_no_longer(ends):
    """Not until the server is done with it: a client that has its answer may ask again at once."""
    limited, running = limits(key_concurrency=1), []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if ends == "well":
            await send({"type": "http.response.body", "body": b"b"})
        elif ends == "with an error":
            raise ValueError("broken")

    async def send(message):
        running.append(limited.running("alice"))

    key = "alice-0123456789abcdef"
    gate = Gate(app, routes=[], keys=KeyRing([ApiKey("alice", key)]), limits=limited, pages=Pages(()))
    headers = [(b"x-api-key", key.encode()), (b"content-length", b"2")]
    scope = {"type": "http", "headers": headers}
    RequestContext(Headers(raw=headers)).store(scope)
    with contextlib.suppress(ValueError):
        asyncio.run(gate(scope, None, send))
    assert running == [1, 1, 0][: 3 if ends == "well" else 2]
    assert limited.running("alice") == 0
