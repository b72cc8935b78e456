"""Rotary frequencies: YaRN as published, with the correction range rounded only where the config says so."""

import numpy as np
import pytest
from darkbloom_gpt_oss._rope import Rope, Yarn

# What transformers 5.24 computes for heads of 32 dimensions, theta 150000, factor 32 over 4096
# positions, not rounded; and for the published heads of 64, every fourth pair.
REFERENCE_32 = [
    1.0,
    0.4747820496559143,
    0.22541800141334534,
    0.1070244163274765,
    0.05081327259540558,
    0.019335001707077026,
    0.006794959306716919,
    0.002093792660161853,
    0.0004564839182421565,
    3.830881178146228e-05,
    1.818833698052913e-05,
    8.635495760245249e-06,
    4.099978468730114e-06,
    1.9465962850517826e-06,
    9.242089618055616e-07,
    4.38797854940276e-07,
]
REFERENCE_64 = {
    0: 1.0,
    4: 0.22541800141334534,
    8: 0.05081327259540558,
    12: 0.006794959306716919,
    16: 0.0004564839182421565,
    20: 1.818833698052913e-05,
    24: 4.099978468730114e-06,
    28: 9.242089618055616e-07,
}


def rope(truncate, dimensions=64):
    return Rope(dimensions, 150000.0, Yarn(32.0, 4096, 32.0, 1.0, truncate), 1.0)


def test_frequencies_are_those_of_the_reference_to_the_last_bit_or_nearly():
    """Positions multiply the difference: two units in the last place were 2.7e-5 of the logits at position 4,000."""
    assert rope(False, 32).inverse_frequencies().tolist() == REFERENCE_32
    found = rope(False).inverse_frequencies()
    assert found.shape == (32,)
    for pair, expected in REFERENCE_64.items():
        assert abs(found[pair] - np.float32(expected)) <= np.spacing(np.float32(expected))


def test_rounding_the_correction_range_would_change_them():
    exact, rounded = rope(False).inverse_frequencies(), rope(True).inverse_frequencies()
    assert np.abs(rounded / exact - 1).max() > 0.05


def test_fast_pairs_are_kept_and_slow_ones_interpolated():
    plain = Rope(64, 150000.0, None, 1.0).inverse_frequencies()
    found = rope(False).inverse_frequencies()
    assert found[:8] == pytest.approx(plain[:8])
    assert found[18:] == pytest.approx(plain[18:] / 32)
    assert (np.diff(found) < 0).all()
