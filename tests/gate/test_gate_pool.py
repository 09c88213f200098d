"""Intervals over processes cover what they say, and changes carry their own uncertainty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.gate.policy import TimeRule
from megabench.gate.pool import (
    Pairs,
    Times,
    compare_pairs,
    compare_times,
    coverage,
    median_interval,
)

FIVE = (20.0, 20.4, 19.8, 20.1, 19.9)
LEVEL = 0.92


def test_five_processes_are_the_fewest_for_an_interval_at_the_default_level() -> None:
    assert TimeRule().level == LEVEL
    assert median_interval(FIVE[:4], LEVEL) is None
    assert median_interval(FIVE, LEVEL) is not None
    assert median_interval((), LEVEL) is None


def test_at_its_highest_level_an_interval_is_the_range() -> None:
    assert coverage(5, 0) == 1 - 2 / 32
    assert median_interval(FIVE, coverage(5, 0)) == (19.8, 20.4)


def test_more_processes_let_the_interval_leave_out_the_extremes() -> None:
    eight = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1000.0)
    found = median_interval(eight, coverage(8, 1))
    assert found == (2.0, 7.0)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.floats(0.05, 0.99), st.floats(0.05, 0.99))
def test_a_higher_level_never_narrows_an_interval(count: int, one: float, other: float) -> None:
    values = tuple(float(i) for i in range(count))
    wide = median_interval(values, max(one, other))
    narrow = median_interval(values, min(one, other))
    if wide is not None:
        assert narrow is not None
        assert 0 <= wide[0] <= narrow[0] <= narrow[1] <= wide[1] <= count - 1


@pytest.mark.parametrize("count", [5, 8, 10, 11])
def test_an_interval_holds_the_true_median_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(3)
    inside, trials = 0, 4000
    for values in rng.standard_normal((trials, count)):
        found = median_interval(tuple(values), LEVEL)
        assert found is not None
        inside += found[0] < 0 < found[1]
    assert inside / trials == pytest.approx(LEVEL, abs=0.012)


def test_a_change_is_relative_absolute_and_in_cycles() -> None:
    base = Times((10.0,) * 5, (1000.0,) * 5)
    run = Times((11.0,) * 5, (900.0,) * 5)
    change = compare_times(base, run, LEVEL)
    assert change is not None
    assert change.relative == pytest.approx(0.1)
    assert change.absolute_us == pytest.approx(1.0)
    assert change.cycles == pytest.approx(-0.01)
    assert change.apart
    assert change.room == pytest.approx(0.1)  # no noise, no room


def test_without_a_clock_on_either_side_there_are_no_cycles() -> None:
    known, unknown = Times(FIVE, (1755.0,) * 5), Times(FIVE)
    for base, run in ((known, unknown), (unknown, known)):
        change = compare_times(base, run, LEVEL)
        assert change is not None
        assert change.cycles is None
    assert known.joined(unknown).clocks_mhz == ()
    assert known.joined(known).clocks_mhz == (1755.0,) * 10


def test_touching_intervals_are_not_apart() -> None:
    base, run = Times((1.0, 2.0, 3.0, 5.0, 5.0)), Times((5.0, 5.0, 7.0, 8.0, 9.0))
    change = compare_times(base, run, LEVEL)
    assert change is not None
    assert not change.apart


@pytest.mark.parametrize("cv", [0.003, 0.01, 0.05])
def test_the_room_for_a_slowdown_is_exceeded_as_rarely_as_it_says(cv: float) -> None:
    rng = np.random.default_rng(11)
    truth, exceeded, trials = 0.02, 0, 1000
    for _ in range(trials):
        base = Times(tuple(np.exp(cv * rng.standard_normal(5))))
        run = Times(tuple((1 + truth) * np.exp(cv * rng.standard_normal(5))))
        change = compare_times(base, run, LEVEL)
        assert change is not None
        exceeded += change.room < truth
    assert exceeded / trials < 0.08  # 5 % and the small-sample error of the normal shortcut


def test_pairs_change_by_the_ratio_of_ratios_in_time_and_in_cycles() -> None:
    change = compare_pairs(Pairs(0.5, 0.49, 0.51, 20), Pairs(0.55, 0.54, 0.56, 20), 40.0)
    assert change.relative == pytest.approx(0.1)
    assert change.absolute_us == pytest.approx(4.0)
    assert change.cycles == change.relative
    assert change.apart
