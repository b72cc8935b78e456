"""Observed rates: smoothing, and which requests do not count."""

from __future__ import annotations

import pytest

from darkbloom_core.engine._rates import LayerSeconds, PartSeconds, Rate, Rates


def test_the_first_sample_stands_for_itself_and_later_ones_weigh_three_tenths():
    rate = Rate()
    assert rate.value is None
    rate.add(1000, 1.0)
    assert rate.value == 1000
    rate.add(2000, 1.0)
    assert rate.value == pytest.approx(1300)


@pytest.mark.parametrize(
    ("tokens", "seconds", "counts"),
    [(20_000, 1.0, True), (20_001, 1.0, False), (10, 0.001, True), (10, 0.0009, False), (0, 1.0, False)],
)
def test_a_prefill_that_cannot_be_real_does_not_count(tokens, seconds, counts):
    rates = Rates()
    rates.ended(
        prompt_tokens=tokens,
        cached_tokens=0,
        completion_tokens=1,
        first_token_seconds=seconds,
        decode_seconds=0.0,
    )
    assert (rates.prefill.value is not None) is counts
    assert rates.decode.value is None


def test_a_cached_prompt_says_nothing_about_prefill_but_its_answer_counts():
    rates = Rates()
    rates.ended(
        prompt_tokens=1000,
        cached_tokens=256,
        completion_tokens=11,
        first_token_seconds=1.0,
        decode_seconds=2.0,
    )
    assert rates.prefill.value is None
    assert rates.decode.value == 5.0


# --- layers -----------------------------------------------------------------------------------


def test_what_a_layer_takes_is_scaled_to_one_size_and_smoothed_and_slower_ones_weigh_more():
    found = LayerSeconds(256, 256, 0.010)
    found.took(256, 2, 0.040)
    assert found.value == pytest.approx(0.010 + 0.7 * 0.010)
    found.took(256, 1, 0.007)
    assert found.value == pytest.approx(0.017 - 0.3 * 0.010)
    longer = LayerSeconds(256, 256, 0.010)
    longer.took(1024, 1, 0.040)
    assert longer.value == pytest.approx(0.010)


def test_small_work_never_makes_large_work_look_fast():
    found = LayerSeconds(280, 70, 0.010)
    for tokens in (1, 70, 139):
        found.took(tokens, 3, 1e-6)
    assert found.value == 0.010
    found.took(70, 1, 0.005)
    assert found.value == pytest.approx(0.010 + 0.7 * 0.010)


def test_without_a_measurement_the_first_one_stands_for_itself():
    found = LayerSeconds(256, 256, None)
    found.took(200, 4, 0.040)
    assert found.value == pytest.approx(0.010)


def test_parts_are_timed_for_each_layer_size_and_depth_by_themselves():
    found = PartSeconds()
    found.took(0, 32, 8192, 0.060)
    found.took(1, 32, 8192, 0.002)
    found.took(1, 25, 8192, 0.001)
    assert (found.of(0, 32, 9000), found.of(1, 63, 8200)) == (0.060, 0.002)
    assert (found.of(1, 25, 8192), found.of(2, 32, 8192)) == (0.001, None)
    assert (found.of(0, 16, 8192), found.of(0, 32, 100_000)) == (None, None)


def test_a_part_that_took_longer_than_the_last_ones_counts_more():
    found = PartSeconds()
    for seconds, wanted in ((0.010, 0.010), (0.020, 0.017), (0.007, 0.014)):
        found.took(0, 32, 8192, seconds)
        assert found.of(0, 32, 8192) == pytest.approx(wanted)
