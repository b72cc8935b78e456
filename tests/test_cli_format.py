"""How numbers are written for a person."""

import pytest

from darkbloom_core.cli._format import byte_text, count_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (10 * 1024**2, "10 MiB"),
        (999 * 1024**2, "999 MiB"),
        (1000 * 1024**2, "0.977 GiB"),
        (13 * 1024**3, "13 GiB"),
        (2 * 1024**4, "2 TiB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_needs_fewest_digits(count: int, text: str) -> None:
    assert byte_text(count) == text


def test_counts_have_thousands_separators() -> None:
    assert count_text(131072) == "131,072"
