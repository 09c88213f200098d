"""Sampling stops for a stated reason and summarises without dropping anything."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.bench.sampling import (
    FLOOR_SAMPLES,
    HARD_TIMEOUT,
    Policy,
    decide,
    interleave,
    paired_ratio,
    quantile,
    relative_error,
    summarise,
)

POLICY = Policy(min_samples=10, min_seconds=0.0, timeout=100.0, max_samples=1000)


def at(policy: Policy = POLICY, **state: object) -> str | None:
    known: dict[str, object] = {
        "n": 20,
        "measured_seconds": 1.0,
        "wall_seconds": 0.0,
        "errors": [0.1],
    }
    return decide(policy, **(known | state))  # type: ignore[arg-type]


def test_a_steady_arm_stops_at_the_target() -> None:
    assert at(errors=[0.1, 0.001]) == "target"


def test_the_target_waits_for_the_least_count_and_the_least_time() -> None:
    assert at(errors=[0.0], n=9) is None
    assert at(Policy(min_seconds=2.0), errors=[0.0], measured_seconds=1.9) is None


def test_noise_that_no_longer_falls_is_a_plateau() -> None:
    assert at(errors=[0.1, 0.1, 0.1, 0.1]) is None
    assert at(errors=[0.1, 0.1, 0.1, 0.1, 0.1]) == "plateau"


def test_noise_that_still_falls_is_no_plateau() -> None:
    assert at(errors=[0.1, 0.09, 0.08, 0.07, 0.06]) is None


def test_a_time_out_leaves_at_least_three_samples() -> None:
    assert at(n=FLOOR_SAMPLES - 1, wall_seconds=101.0) is None
    assert at(n=FLOOR_SAMPLES, wall_seconds=101.0) == "timeout"


def test_a_device_that_never_gives_a_sample_ends_all_the_same() -> None:
    assert at(n=0, wall_seconds=100.0 * HARD_TIMEOUT) == "timeout"


def test_the_budget_of_samples_ends_noisy_sampling() -> None:
    assert at(n=1000, errors=[0.5, 0.3]) == "max_samples"


def test_arms_alternate_their_order_and_stay_paired() -> None:
    order: list[str] = []

    def arm(name: str) -> Callable[[int], list[float]]:
        def take(n: int) -> list[float]:
            order.append(name)
            return [100.0] * n

        return take

    first, second = interleave([arm("a"), arm("b")], POLICY)
    assert order[:8] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert len(first.rounds) == len(second.rounds)
    assert first.reason == second.reason == "target"


def test_slow_ops_are_taken_one_sample_at_a_time() -> None:
    asked: list[int] = []

    def take(n: int) -> list[float]:
        asked.append(n)
        return [1e6] * n

    interleave([take], POLICY)
    assert set(asked) == {1}


def test_every_sample_is_kept() -> None:
    given_out: list[float] = []
    rng = np.random.default_rng(1)

    def take(n: int) -> list[float]:
        block = [float(x) for x in rng.lognormal(3, 1, n)]
        given_out.extend(block)
        return block

    (outcome,) = interleave([take], Policy(min_seconds=0.0, timeout=100.0, max_samples=50))
    assert outcome.values == given_out


def test_drift_common_to_both_arms_leaves_the_ratio_alone() -> None:
    drift = np.linspace(1.0, 3.0, 40)
    slow: list[float | None] = [float(1.1 * d) for d in drift]
    fast: list[float | None] = [float(d) for d in drift]
    paired = paired_ratio(slow, fast)
    assert paired is not None
    ratio, interval, pairs = paired
    assert ratio == pytest.approx(1.1)
    assert interval.low == pytest.approx(1.1)
    assert pairs == 40


def test_a_round_that_telemetry_refused_leaves_its_pair_out() -> None:
    paired = paired_ratio([1.0, None, 3.0], [1.0, 2.0, None])
    assert paired is not None
    assert paired[2] == 1
    assert paired_ratio([None], [1.0]) is None


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60))
def test_the_summary_orders_and_brackets_the_median(values: list[float]) -> None:
    s = summarise(values)
    assert s.minimum <= s.q1 <= s.median <= s.q3
    assert s.ci.low <= s.median <= s.ci.high
    assert s.n == len(values)
    assert summarise(values) == s


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60), st.floats(0.0, 1.0))
def test_quantiles_lie_on_the_line_between_their_neighbours(
    values: list[float], share: float
) -> None:
    assert quantile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)))
    assert summarise(values).q3 == quantile(sorted(values), 0.75)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for seed in range(120):
        ci = summarise(list(rng.normal(100.0, 5.0, 40)), seed).ci
        covered += ci.low <= 100.0 <= ci.high
    assert covered >= 105  # 95 % of 120 is 114; three deviations below that is 107


def test_no_samples_have_no_summary_and_no_error() -> None:
    with pytest.raises(ValueError, match="values"):
        summarise([])
    assert math.isinf(relative_error([1.0]))
