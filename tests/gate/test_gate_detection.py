"""How often the gate is right, by simulation: jitter, outliers and drift on known truth.

A process takes samples with a skewed jitter, a drift over its length and outliers, in the timer's
steps; its median carries an offset of the process besides. Everything is scaled so that the
medians of processes have the coefficient of variation a scenario states. Clocks wander between
processes, and times follow them by half (an op is never bound by the clock alone).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from megabench.gate.policy import TimeRule
from megabench.gate.pool import Times
from megabench.gate.verdicts import RUN_AGAIN, judge_time

Array = npt.NDArray[np.float64]
RULE, PROCESSES = TimeRule(), 5
TRIALS = 3000
SAMPLES = 40
JITTER = 0.01
OUTLIER_SHARE = 0.05
DRIFT = 0.01
"""Largest drift from a process's first sample to its last, either way."""
TICK_US = 0.032
"""Steps of the event timer."""
CLOCK_MHZ, CLOCK_STEP_MHZ, CLOCK_CV = 1755.0, 15.0, 0.004


@dataclass(frozen=True)
class Scenario:
    """`cv` of process medians, the op's time, and how much slower the run truly is."""

    cv: float
    base_us: float
    slowdown: float


def samples(rng: np.random.Generator, us: float, processes: int) -> Array:
    """[TRIALS, processes, SAMPLES] of one op in microseconds, without the process's own offset."""
    shape = (TRIALS, processes, SAMPLES)
    jitter = JITTER * (rng.gamma(2.0, size=shape) - 2.0)
    drift = rng.uniform(-DRIFT, DRIFT, (*shape[:2], 1)) * np.linspace(-0.5, 0.5, SAMPLES)
    outliers = rng.random(shape) < OUTLIER_SHARE
    factor = 1 + jitter + drift + outliers * rng.uniform(0.1, 2.0, shape)
    return np.round(us * factor / TICK_US) * TICK_US


@cache
def within() -> float:
    """The CV that sampling alone gives a process's median."""
    medians = np.median(samples(np.random.default_rng(1), 100.0, 1), axis=2)
    return float(medians.std() / medians.mean())


def medians_and_clocks(
    rng: np.random.Generator, us: float, cv: float, processes: int
) -> tuple[Array, Array]:
    """[TRIALS, processes] medians with a CV of `cv`, and the clock each process read."""
    clock = CLOCK_CV * rng.standard_normal((TRIALS, processes))
    own = np.sqrt(max(cv**2 - within() ** 2 - (CLOCK_CV / 2) ** 2, 0.0))
    offset = own * rng.standard_normal((TRIALS, processes)) - clock / 2
    medians = np.median(samples(rng, us, processes), axis=2) * (1 + offset)
    read = np.round(CLOCK_MHZ * (1 + clock) / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
    return medians, read


@cache
def verdicts(scenario: Scenario, *, rerun: bool = False) -> Counter[str]:
    """Shares of verdicts over independent baselines and runs."""
    rng = np.random.default_rng(0)
    slow_us = scenario.base_us * (1 + scenario.slowdown)
    sides = [
        medians_and_clocks(rng, us, scenario.cv, PROCESSES)
        for us in (scenario.base_us, slow_us, slow_us)
    ]
    found: Counter[str] = Counter()
    for trial in range(TRIALS):
        base, run, again = (Times(tuple(m[trial]), tuple(c[trial])) for m, c in sides)
        decision = judge_time(base, run, RULE, PROCESSES)
        if rerun and decision.code in RUN_AGAIN:
            decision = judge_time(base, run, RULE, PROCESSES, again)
        found[decision.verdict] += 1
    return Counter({verdict: n / TRIALS for verdict, n in found.items()})


def test_the_simulated_processes_have_the_dispersion_they_claim() -> None:
    assert 0.001 < within() < 0.004
    for cv in (0.005, 0.01):
        medians, _ = medians_and_clocks(np.random.default_rng(2), 40.0, cv, PROCESSES)
        assert medians.std() / medians.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("rerun", [False, True], ids=["one run", "with re-run"])
@pytest.mark.parametrize("base_us", [12.0, 150.0])
def test_five_percent_slower_is_found(base_us: float, rerun: bool) -> None:
    found = verdicts(Scenario(0.01, base_us, 0.05), rerun=rerun)
    assert found["SLOWER"] >= 0.99
    assert found["SAME"] + found["FASTER"] == 0


@pytest.mark.parametrize("base_us", [12.0, 150.0])
@pytest.mark.parametrize("cv", [0.005, 0.01])
def test_three_percent_slower_never_passes_for_the_same(base_us: float, cv: float) -> None:
    found = verdicts(Scenario(cv, base_us, 0.03))
    assert found["SLOWER"] + found["AMBIGUOUS"] >= 0.95


@pytest.mark.parametrize("rerun", [False, True], ids=["one run", "with re-run"])
@pytest.mark.parametrize("cv", [0.01, 0.1])
def test_identical_code_is_not_called_slower_however_noisy(cv: float, rerun: bool) -> None:
    assert verdicts(Scenario(cv, 20.0, 0.0), rerun=rerun)["SLOWER"] < 0.01


def test_identical_code_is_the_same_when_quiet_or_run_again() -> None:
    assert verdicts(Scenario(0.005, 20.0, 0.0))["SAME"] >= 0.99
    once = verdicts(Scenario(0.01, 20.0, 0.0))["SAME"]
    assert verdicts(Scenario(0.01, 20.0, 0.0), rerun=True)["SAME"] > once


def test_noise_leaves_a_slowdown_ambiguous_not_the_same() -> None:
    found = verdicts(Scenario(0.1, 20.0, 0.03))
    assert found["SAME"] + found["FASTER"] < 0.06  # the room's 5 %, and chance
    assert found["AMBIGUOUS"] > 0.9


def test_below_twelve_microseconds_a_few_percent_are_ambiguous() -> None:
    found = verdicts(Scenario(0.005, 4.0, 0.05))
    assert found["AMBIGUOUS"] >= 0.95
    assert found["SLOWER"] < 0.01


def test_a_large_slowdown_of_a_short_op_is_found_all_the_same() -> None:
    assert verdicts(Scenario(0.01, 4.0, 0.15))["SLOWER"] >= 0.99
