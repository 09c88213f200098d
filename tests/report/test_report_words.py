"""Numbers keep their size and unit when they become words."""

from __future__ import annotations

import math

import pytest

from megabench.report.words import digits, microseconds, percent, rate, ratio, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.500 µs"),
        (29.04, "29.0 µs"),
        (9999.0, "9,999 µs"),
        (12_345.0, "12.3 ms"),
        (2.5e7, "25.0 s"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_times(value: float | None, text: str) -> None:
    assert microseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(4.3e12, "4.30 TB/s"), (1.2e3, "1.20 kB/s"), (None, "–")]
)
def test_rates(value: float | None, text: str) -> None:
    assert rate(value, "B/s") == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.694, "69 %"), (0.0123, "1.2 %"), (0.0, "0 %"), (None, "–")]
)
def test_percents(value: float | None, text: str) -> None:
    assert percent(value) == text


def test_an_infinite_ratio_is_shown_and_never_hidden() -> None:
    assert ratio(math.inf) == "∞"
    assert ratio(math.nan) == "NaN"
    assert ratio(0.0) == "0"


def test_sizes_and_digits() -> None:
    assert size(141 << 30) == "141 GiB"
    assert size(512) == "512 B"
    assert digits(1234.5) == "1,234"
    assert digits(0.001234) == "0.00123"
    assert digits(0.99996) == "1.00"
    assert digits(999.6) == "1,000"
