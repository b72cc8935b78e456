"""Rotary frequencies: YaRN as published, with the correction range rounded only where the config says so."""

import numpy as np
import pytest
from darkbloom_gpt_oss._rope import Rope, Yarn

# attention heads of 64 dimensions, theta 150000, factor 32 over 4096 positions, not rounded:
# what transformers 5.24 computes for every fourth pair
PUBLISHED = {
    0: 1.0,
    4: 0.22541800,
    8: 0.050813273,
    12: 0.0067949593,
    16: 0.00045648392,
    20: 1.8188337e-05,
    24: 4.0999785e-06,
    28: 9.2420896e-07,
}


def rope(truncate):
    return Rope(64, 150000.0, Yarn(32.0, 4096, 32.0, 1.0, truncate), 1.0)


def test_the_published_frequencies_are_those_of_the_reference():
    found = rope(truncate=False).inverse_frequencies()
    assert found.shape == (32,)
    for pair, expected in PUBLISHED.items():
        assert found[pair] == pytest.approx(expected, rel=1e-6)


def test_rounding_the_correction_range_would_change_them():
    exact, rounded = rope(False).inverse_frequencies(), rope(True).inverse_frequencies()
    assert np.abs(rounded / exact - 1).max() > 0.05


def test_fast_pairs_are_kept_and_slow_ones_interpolated():
    plain = Rope(64, 150000.0, None, 1.0).inverse_frequencies()
    found = rope(False).inverse_frequencies()
    assert found[:8] == pytest.approx(plain[:8])
    assert found[18:] == pytest.approx(plain[18:] / 32)
    assert (np.diff(found) < 0).all()
