"""How the KV budget is divided, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.memory import KvDemand, MemoryTerms, kv_grants

GIB = 1024**3

WIDE = KvDemand(bytes_per_token=24_576, context_tokens=131_072)
LONG = KvDemand(bytes_per_token=20_480, context_tokens=262_144)


@pytest.mark.parametrize(
    ("budget", "demands", "grants"),
    [
        (22 * GIB, (LONG, WIDE), (10737418240, 12884901888)),
        (86 * GIB, (WIDE, LONG), (50368252834, 41973544029)),
        (30 * GIB, (LONG, WIDE, KvDemand(4096, 32_768)), (14316557653, 17179869184, 715827882)),
        (9 * GIB, (LONG, WIDE, KvDemand(0, 4096)), (3221225472,) * 3),
    ],
)
def test_the_table_of_shares_is_right_to_the_byte(budget, demands, grants):
    assert kv_grants(budget, demands) == grants


def test_equal_weighed_contexts_get_equal_tokens():
    wide, long = kv_grants(86 * GIB, (WIDE, LONG))
    assert wide // WIDE.bytes_per_token == long // LONG.bytes_per_token == 2_049_489


def test_one_model_gets_everything_and_none_gets_nothing():
    assert kv_grants(100 * GIB, (WIDE,)) == (100 * GIB,)
    assert kv_grants(100 * GIB, (KvDemand(0, 0),)) == (100 * GIB,)
    assert kv_grants(100 * GIB, ()) == ()


def test_a_context_of_a_million_weighs_as_much_as_one_of_131072():
    million = KvDemand(24_576, 1_000_000)
    assert million.weight == WIDE.weight == KvDemand(24_576, 0).weight
    assert kv_grants(22 * GIB, (million, WIDE)) == (11 * GIB, 11 * GIB)


@pytest.mark.parametrize("rate", [0, -5])
def test_an_unknown_rate_divides_evenly_among_all(rate):
    assert kv_grants(10, (WIDE, KvDemand(rate, 4096), LONG)) == (3, 3, 3)


def test_weights_too_large_to_compare_divide_evenly():
    assert kv_grants(10, (KvDemand(2**60, 131_072), WIDE)) == (5, 5)


def test_a_share_below_the_minimum_refuses_the_set():
    terms = MemoryTerms(physical_bytes=64 * GIB)
    assert terms.grants(30 * GIB, (LONG, WIDE, KvDemand(4096, 32_768))) is None
    assert terms.grants(0, ()) == ()


def test_the_smallest_budget_for_two_models_is_two_point_two_gib():
    terms = MemoryTerms(physical_bytes=64 * GIB)
    budget = 2_362_232_013  # 2.2 GiB, rounded up
    assert terms.grants(budget, (WIDE, LONG)) == (1_288_490_188, GIB)
    assert terms.grants(budget - 3, (WIDE, LONG)) is None


DEMANDS = st.lists(st.builds(KvDemand, st.integers(-1, 2**50), st.integers(-1, 2**21)), max_size=9)


@given(st.integers(-1, 2**64), DEMANDS)
def test_grants_never_add_up_to_more_than_the_budget(budget, demands):
    grants = kv_grants(budget, demands)
    assert len(grants) == len(demands)
    assert all(grant >= 0 for grant in grants)
    assert sum(grants) <= max(0, budget)


@given(st.integers(2**20, 2**45), DEMANDS)
def test_hardly_anything_stays_unassigned(budget, demands):
    grants = kv_grants(budget, demands)
    if grants:
        assert sum(grants) >= budget - len(demands) - budget // 2**50 * len(demands) - 1


@given(st.integers(0, 2**45), DEMANDS, st.randoms())
def test_the_order_of_the_models_changes_no_share(budget, demands, random):
    order = list(range(len(demands)))
    random.shuffle(order)
    grants = kv_grants(budget, demands)
    shuffled = kv_grants(budget, [demands[index] for index in order])
    assert all(abs(shuffled[place] - grants[index]) <= 2**6 for place, index in enumerate(order))
