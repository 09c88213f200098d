"""Intervals over processes cover what they say, and changes carry their own uncertainty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.gate.pool import (
    Pairs,
    Times,
    compare_pairs,
    compare_times,
    coverage,
    median_interval,
)

FIVE = (20.0, 20.4, 19.8, 20.1, 19.9)


def test_five_processes_are_the_fewest_whose_range_covers_ninety_percent() -> None:
    assert median_interval(FIVE[:4], 0.9) is None
    assert median_interval(FIVE, 0.9) == (19.8, 20.4)
    assert coverage(5, 0) == 1 - 2 / 32
    assert median_interval((), 0.9) is None


def test_more_processes_let_the_interval_leave_out_the_extremes() -> None:
    eight = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 100.0)
    assert median_interval(eight, 0.9) == (2.0, 7.0)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.floats(0.05, 0.99))
def test_an_interval_is_the_narrowest_that_covers_its_level(count: int, level: float) -> None:
    values = tuple(float(i) for i in range(count))
    found = median_interval(values, level)
    if found is None:
        assert coverage(count, 0) < level
        return
    cut = int(found[0])
    assert found == (cut, count - 1 - cut)
    assert coverage(count, cut) >= level
    assert found[0] <= found[1]
    narrower = cut + 1
    assert narrower > (count - 1) // 2 or coverage(count, narrower) < level


@pytest.mark.parametrize("count", [5, 8, 10])
def test_coverage_is_how_often_an_interval_holds_the_true_median(count: int) -> None:
    rng = np.random.default_rng(3)
    ordered = np.sort(rng.standard_exponential((20_000, count)), axis=1)
    for cut in range(2):
        inside = (ordered[:, cut] < np.log(2)) & (np.log(2) < ordered[:, -1 - cut])
        assert inside.mean() == pytest.approx(coverage(count, cut), abs=0.015)


def test_a_change_is_relative_absolute_and_in_cycles() -> None:
    base = Times((10.0,) * 5, (1000.0,) * 5)
    run = Times((11.0,) * 5, (900.0,) * 5)
    change = compare_times(base, run, 0.9)
    assert change is not None
    assert change.relative == pytest.approx(0.1)
    assert change.absolute_us == pytest.approx(1.0)
    assert change.cycles == pytest.approx(-0.01)
    assert change.apart
    assert change.room == pytest.approx(0.1)  # no noise, no room


def test_without_a_clock_on_either_side_there_are_no_cycles() -> None:
    known, unknown = Times(FIVE, (1755.0,) * 5), Times(FIVE)
    for base, run in ((known, unknown), (unknown, known)):
        change = compare_times(base, run, 0.9)
        assert change is not None
        assert change.cycles is None
    assert known.joined(unknown).clocks_mhz == ()
    assert known.joined(known).clocks_mhz == (1755.0,) * 10


def test_touching_intervals_are_not_apart() -> None:
    base, run = Times((1.0, 2.0, 3.0, 4.0, 5.0)), Times((5.0, 6.0, 7.0, 8.0, 9.0))
    change = compare_times(base, run, 0.9)
    assert change is not None
    assert not change.apart


@pytest.mark.parametrize("cv", [0.003, 0.01, 0.05])
def test_the_room_for_a_slowdown_is_exceeded_as_rarely_as_it_says(cv: float) -> None:
    rng = np.random.default_rng(11)
    truth, exceeded, trials = 0.02, 0, 1000
    for _ in range(trials):
        base = Times(tuple(np.exp(cv * rng.standard_normal(5))))
        run = Times(tuple((1 + truth) * np.exp(cv * rng.standard_normal(5))))
        change = compare_times(base, run, 0.9)
        assert change is not None
        exceeded += change.room < truth
    assert exceeded / trials < 0.08  # 5 % and the small-sample error of the normal shortcut


def test_pairs_change_by_the_ratio_of_ratios_in_time_and_in_cycles() -> None:
    change = compare_pairs(Pairs(0.5, 0.49, 0.51, 20), Pairs(0.55, 0.54, 0.56, 20), 40.0)
    assert change.relative == pytest.approx(0.1)
    assert change.absolute_us == pytest.approx(4.0)
    assert change.cycles == change.relative
    assert change.apart
