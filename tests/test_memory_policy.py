"""Memory policy to the byte: the tables, the scenarios, and what holds for any input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.memory import (
    MOST_BYTES,
    MemoryTerms,
    activation_floor,
    activation_reserve,
    advertised_grant,
    cap_fraction,
    effective_cap,
    free_for_load,
    hard_cap,
    kv_budget,
    live_headroom,
    load_headroom,
    load_reserve,
    minimum_kv,
    required_to_load,
    serves_after_load,
    weight_estimate,
)

GIB = 1024**3
ACTIVATIONS = 3 * GIB

MACHINES = [
    # GiB, hard cap, load reserve, usable, largest weights with reserve 4 and 0, KV beside 12 GiB and 12 + 14 GiB
    (8, 6442450944, 4.0, 4.0, 0.0, 2.0, 0, 0),
    (16, 15032385536, 4.0, 12.0, 8.0, 10.0, 0, 0),
    (20, 19327352832, 4.0, 16.0, 12.0, 14.0, 1073741824, 0),
    (24, 23192823398, 4.0, 20.0, 16.0, 17.6, 5368709120, 0),
    (32, 30923764531, 4.0, 28.0, 24.0, 24.8, 13958643712, 0),
    (36, 34789235097, 4.0, 32.0, 28.0, 28.4, 18253611008, 3221225472),
    (64, 61847529062, 6.4, 57.6, 53.6, 53.6, 45741401702, 30709016166),
    (128, 123695058124, 12.8, 115.2, 111.2, 111.2, 107588930764, 92556545228),
]


def near(gibibytes: float):
    """One decimal of a GiB, as the tables give it."""
    return pytest.approx(gibibytes * GIB, abs=0.05 * GIB)


@pytest.mark.parametrize(("size", "cap", "reserve", "usable", "with_4", "with_0", "kv_12", "kv_26"), MACHINES)
def test_the_table_of_machines_is_right_to_the_byte(size, cap, reserve, usable, with_4, with_0, kv_12, kv_26):
    physical, headroom = size * GIB, load_headroom(ACTIVATIONS)
    assert headroom == 4 * GIB
    assert hard_cap(physical) == cap
    assert load_reserve(physical, 4 * GIB) == near(reserve) == max(4 * GIB, physical - cap)
    free = free_for_load(physical, 0, None, load_reserve_bytes=load_reserve(physical, 4 * GIB))
    assert free == near(usable)
    assert max(0, free - headroom) == near(with_4)
    free = free_for_load(physical, 0, None, load_reserve_bytes=load_reserve(physical, 0))
    assert max(0, free - headroom) == near(with_0)
    capped = effective_cap(physical, 4 * GIB)
    assert kv_budget(capped, 12 * GIB, ACTIVATIONS) == kv_12
    assert kv_budget(capped, 26 * GIB, ACTIVATIONS) == kv_26


@pytest.mark.parametrize("size", [machine[0] for machine in MACHINES])
def test_the_terms_of_a_machine_are_those_of_the_table(size):
    terms = MemoryTerms(physical_bytes=size * GIB)
    assert terms.activation_reserve(2 * GIB) == 3 * GIB
    assert terms.minimum_kv(2 * GIB) == GIB
    assert terms.load_headroom(2 * GIB) == terms.load_headroom() == 4 * GIB


def test_an_eight_gib_machine_keeps_the_systems_floor():
    assert live_headroom(effective_cap(8 * GIB, 0), 2 * GIB, 6 * GIB, ACTIVATIONS) == GIB


@pytest.mark.parametrize(("system_free", "expected"), [(None, 72.2), (20 * GIB, 17.0)])
def test_live_headroom_is_held_down_by_what_the_system_has_left(system_free, expected):
    cap = effective_cap(128 * GIB, 0)
    assert live_headroom(cap, 40 * GIB, system_free, ACTIVATIONS) == near(expected)


@pytest.mark.parametrize(("reserve", "expected"), [(0, 8.6), (4, 7.0), (8, 3.0)])
def test_the_operators_reserve_lowers_live_headroom(reserve, expected):
    cap = effective_cap(24 * GIB, reserve * GIB)
    assert live_headroom(cap, 10 * GIB, None, ACTIVATIONS) == near(expected)


def test_a_full_machine_has_no_headroom():
    assert live_headroom(effective_cap(64 * GIB, 0), 60 * GIB, None, ACTIVATIONS) == 0


@pytest.mark.parametrize(("outstanding", "free", "verdict"), [(4, 19.6, "fits"), (8, 15.6, "does not fit")])
def test_the_gate_counts_what_is_reserved_but_not_allocated(outstanding, free, verdict):
    terms = MemoryTerms(physical_bytes=64 * GIB, operator_reserve_bytes=4 * GIB)
    check = terms.check_load(
        12 * GIB, used_bytes=20 * GIB, system_free_bytes=30 * GIB, outstanding_bytes=outstanding * GIB
    )
    assert check.required_bytes == 16 * GIB
    if outstanding == 4:
        assert check.free_bytes == 30 * GIB - (terms.load_reserve_bytes + 4 * GIB) == near(free)
    assert check.free_bytes == near(free)
    assert check.verdict == verdict


def test_a_model_that_loads_is_missing_from_what_the_others_may_reserve():
    headroom = live_headroom(effective_cap(64 * GIB, 0), 15 * GIB, None, ACTIVATIONS)
    assert headroom - 14 * GIB == near(25.6)


@pytest.mark.parametrize(
    ("measured", "outstanding", "serves"),
    [
        (GIB, 0, True),
        (GIB - 1, 0, False),
        (3 * GIB, 2 * GIB, True),
        (int(2.5 * GIB), 2 * GIB, False),
    ],
)
def test_after_a_load_the_minimum_kv_and_all_reservations_must_fit(measured, outstanding, serves):
    assert serves_after_load(measured, outstanding) is serves


@pytest.mark.parametrize("given", ["0", "-1", "nan", "junk", "inf", "", 0, -0.5, math.nan, math.inf, None])
def test_a_degenerate_fraction_means_the_default(given):
    assert cap_fraction(given) == 0.90


def test_a_fraction_above_one_means_all_and_leaves_the_system_its_floor():
    assert cap_fraction("2") == 1.0
    assert cap_fraction("0.5") == 0.5
    assert hard_cap(64 * GIB, cap_fraction("2")) == 62 * GIB


def test_an_explicit_fraction_is_held_between_0_and_1():
    assert hard_cap(64 * GIB, 7.0) == 62 * GIB
    assert hard_cap(64 * GIB, -1.0) == 0
    assert hard_cap(64 * GIB, math.nan) == hard_cap(64 * GIB)


def test_the_activation_reserve_can_be_raised_and_zero_means_nothing():
    cap = hard_cap(64 * GIB)
    assert activation_reserve(cap) == 3 * GIB
    assert activation_reserve(cap, configured_bytes=5 * GIB) == 5 * GIB
    assert activation_reserve(cap, configured_bytes=0) == 3 * GIB
    assert activation_reserve(cap, configured_bytes=-1) == 3 * GIB
    assert activation_reserve(cap, configured_bytes=GIB, measured_bytes=2 * GIB) == 2 * GIB


@given(st.integers(0, 2**40))
def test_small_machines_scale_the_reserve_and_the_minimum_kv_down_together(cap):
    activations, least = activation_floor(cap), minimum_kv(cap)
    if cap >= 6 * GIB:
        assert (activations, least) == (3 * GIB, GIB)
    else:
        assert (activations, least) == (cap // 2, cap // 6)
    assert activations + least <= cap


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_caps_never_go_negative_and_leave_the_system_its_floor(physical, reserve):
    assert 0 <= effective_cap(physical, reserve) <= hard_cap(physical) <= max(0, physical - 2 * GIB)
    if physical <= 2 * GIB:
        assert hard_cap(physical) == 0


ANY = st.one_of(st.integers(-(2**70), 2**70), st.integers(0, 2**45))


@given(ANY, ANY, ANY, st.one_of(st.none(), ANY), ANY, st.floats())
def test_nothing_raises_wraps_or_goes_negative(physical, used, reserve, system_free, weights, fraction):
    cap = effective_cap(physical, reserve, fraction)
    results = [
        cap,
        hard_cap(physical, fraction),
        load_reserve(physical, reserve, fraction),
        load_headroom(weights, used),
        required_to_load(weights, used),
        free_for_load(physical, used, system_free, load_reserve_bytes=reserve, outstanding_bytes=weights),
        kv_budget(cap, weights, reserve),
        live_headroom(cap, used, system_free, reserve),
        activation_reserve(cap, configured_bytes=reserve, measured_bytes=used),
        advertised_grant(physical, used, weights),
        weight_estimate(weights, fraction if math.isfinite(fraction) else 1.0),
    ]
    assert all(isinstance(result, int) and 0 <= result <= MOST_BYTES for result in results)


@given(st.integers(0, 2**42), st.integers(0, 2**42), st.integers(0, 2**42), st.integers(0, 2**42))
def test_the_kv_budget_shrinks_by_what_is_loaded(cap, weights, more, activations):
    assert kv_budget(cap, weights, activations) == max(0, cap - weights - activations)
    assert kv_budget(cap, weights + more, activations) <= kv_budget(cap, weights, activations)


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**38))
def test_what_the_gate_admits_leaves_room_for_kv_and_activations(physical, used, weights, reserve):
    terms = MemoryTerms(physical_bytes=physical, operator_reserve_bytes=reserve)
    if terms.check_load(weights, used_bytes=used).verdict == "fits":
        left = terms.live_headroom(used + weights, weight_bytes=weights)
        assert left >= terms.minimum_kv(weights)


def test_tiny_models_need_little_beside_them():
    terms = MemoryTerms(physical_bytes=16 * GIB)
    tiny = 10 * 2**20
    assert terms.load_headroom(tiny) == 32 * tiny
    assert terms.load_headroom(GIB) == 4 * GIB
    assert terms.check_load(tiny, used_bytes=0, system_free_bytes=3 * GIB).verdict == "fits"
    assert terms.load_headroom(tiny, loaded_weight_bytes=GIB) == 3 * GIB + 16 * tiny


def test_no_gate_discounts_twice():
    terms = MemoryTerms(physical_bytes=64 * GIB)
    largest = terms.effective_cap_bytes - 4 * GIB
    assert terms.check_load(largest, used_bytes=0).verdict == "fits"
    assert terms.check_load(largest + 1, used_bytes=0).verdict == "does not fit"
    weights = 10 * GIB
    assert terms.live_headroom(weights, weight_bytes=weights) == terms.kv_budget(weights)
    assert terms.kv_budget(weights) == terms.effective_cap_bytes - 13 * GIB


def test_what_is_not_known_gives_no_verdict():
    terms = MemoryTerms(physical_bytes=64 * GIB)
    assert terms.check_load(None, used_bytes=0).verdict == "unknown"
    assert terms.check_load(GIB, used_bytes=None).verdict == "unknown"
    assert MemoryTerms(physical_bytes=0).check_load(GIB, used_bytes=0).verdict == "unknown"


def test_a_slot_says_only_what_is_left_of_the_budget():
    assert advertised_grant(10, 25, 12) == 10
    assert advertised_grant(10, 20, 12) == 8
    assert advertised_grant(10, 5, 12) == 0
    assert advertised_grant(-3, 5, 0) == 0


def test_weights_are_estimated_from_their_bytes_on_disk():
    assert weight_estimate(10 * GIB) == 12 * GIB
    assert weight_estimate(10 * GIB, memory_per_disk_byte=2.0) == 24 * GIB
