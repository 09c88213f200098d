"""How often the gate is right, by simulation from samples recorded on an H200.

A process draws blocks of an op's recorded samples, so that their skew, outliers and short memory
stay; outliers and a drift over its length are added, and its median carries an offset of the
process besides. Everything is scaled so that the medians of processes have the coefficient of
variation that a scenario states. Clocks wander between processes, and times follow them by half.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from megabench.gate.policy import TimeRule
from megabench.gate.pool import Times
from megabench.gate.verdicts import RUN_AGAIN, judge_time

Array = npt.NDArray[np.float64]
RECORDED = Path(__file__).parent / "h200_samples.json"
RULE, PROCESSES = TimeRule(), 5
TRIALS = 2500
BLOCK, BLOCKS = 10, 4
OUTLIER_SHARE = 0.05
"""Outliers added to those recorded: up to three times the op's time."""
DRIFT = 0.01
"""Largest drift from a process's first sample to its last, either way."""
TICK_US = 0.032
"""Steps of the event timer."""
CLOCK_MHZ, CLOCK_STEP_MHZ, CLOCK_CV = 1755.0, 15.0, 0.004

Op = tuple[str, str]
STEP: Op = ("r1-nvfp4-tp1-32q1s4k", "step")
DECODE: Op = ("r1-nvfp4-tp1-32q1s4k", "decode_attention")
INSERT: Op = ("r1-nvfp4-tp8-512q1s4k", "pad_insert")
"""The noisiest recorded op above 12 us."""
TOPK: Op = ("r1-nvfp4-tp1-32q1s4k", "global_topk")
"""Of 4.7 us."""


@dataclass(frozen=True)
class Scenario:
    """An op, the CV of its process medians, and how much slower the run truly is."""

    op: Op
    cv: float
    slowdown: float
    us: float | None = None
    """The op's time where it is not as recorded."""

    @property
    def base_us(self) -> float:
        return self.us or float(np.median(recorded()[self.op]))


@cache
def recorded() -> dict[Op, Array]:
    """Samples in the order taken, in microseconds."""
    ops = json.loads(RECORDED.read_text(encoding="utf-8"))["ops"]
    return {(op["case"], op["op"]): np.asarray(op["samples_us"]) for op in ops}


def samples(rng: np.random.Generator, op: Op, us: float, processes: int) -> Array:
    """[TRIALS, processes, samples] of an op of `us`, without the process's own offset."""
    series = recorded()[op] / np.median(recorded()[op])
    starts = rng.integers(0, series.size - BLOCK + 1, (TRIALS, processes, BLOCKS, 1))
    drawn = series[starts + np.arange(BLOCK)].reshape(TRIALS, processes, BLOCK * BLOCKS)
    length = np.linspace(-0.5, 0.5, BLOCK * BLOCKS)
    drift = rng.uniform(-DRIFT, DRIFT, (TRIALS, processes, 1)) * length
    outliers = (rng.random(drawn.shape) < OUTLIER_SHARE) * rng.uniform(0.1, 2.0, drawn.shape)
    made: Array = np.round(us * (drawn + drift + outliers) / TICK_US) * TICK_US
    return made


@cache
def within(op: Op) -> float:
    """The CV that sampling alone gives a process's median."""
    medians = np.median(samples(np.random.default_rng(1), op, 100.0, 1), axis=2)
    return float(medians.std() / medians.mean())


def medians_and_clocks(
    rng: np.random.Generator, scenario: Scenario, us: float
) -> tuple[Array, Array]:
    """[TRIALS, PROCESSES] medians with the scenario's CV, and the clock each process read."""
    clock = CLOCK_CV * rng.standard_normal((TRIALS, PROCESSES))
    own = np.sqrt(max(scenario.cv**2 - within(scenario.op) ** 2 - (CLOCK_CV / 2) ** 2, 0.0))
    offset = own * rng.standard_normal((TRIALS, PROCESSES)) - clock / 2
    medians = np.median(samples(rng, scenario.op, us, PROCESSES), axis=2) * (1 + offset)
    read = np.round(CLOCK_MHZ * (1 + clock) / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
    return medians, read


@cache
def verdicts(scenario: Scenario, *, rerun: bool = False) -> Counter[str]:
    """Shares of verdicts over independent baselines and runs."""
    rng = np.random.default_rng(0)
    base_us = scenario.base_us
    slow_us = base_us * (1 + scenario.slowdown)
    sides = [medians_and_clocks(rng, scenario, us) for us in (base_us, slow_us, slow_us)]
    found: Counter[str] = Counter()
    for trial in range(TRIALS):
        base, run, again = (Times(tuple(m[trial]), tuple(c[trial])) for m, c in sides)
        decision = judge_time(base, run, RULE, PROCESSES)
        if rerun and decision.code in RUN_AGAIN:
            decision = judge_time(base, run, RULE, PROCESSES, again)
        found[decision.verdict] += 1
    return Counter({verdict: n / TRIALS for verdict, n in found.items()})


with_and_without_rerun = pytest.mark.parametrize(
    "rerun", [False, True], ids=["one run", "with re-run"]
)


@pytest.mark.parametrize("op", [STEP, INSERT], ids=lambda op: op[1])
def test_the_simulated_processes_have_the_dispersion_they_claim(op: Op) -> None:
    assert 0 < within(op) < 0.01
    medians, _ = medians_and_clocks(np.random.default_rng(2), Scenario(op, 0.01, 0.0), 40.0)
    assert medians.std() / medians.mean() == pytest.approx(0.01, rel=0.05)


@with_and_without_rerun
@pytest.mark.parametrize(
    "scenario",
    [Scenario(STEP, 0.01, 0.05), Scenario(INSERT, 0.01, 0.05, us=12.0)],
    ids=lambda scenario: scenario.op[1],
)
def test_five_percent_slower_is_found(scenario: Scenario, rerun: bool) -> None:
    found = verdicts(scenario, rerun=rerun)
    assert found["SLOWER"] >= 0.99
    assert found["SAME"] + found["FASTER"] == 0


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(STEP, 0.01, 0.03),
        Scenario(STEP, 0.005, 0.03),
        Scenario(INSERT, 0.01, 0.03, us=12.0),
    ],
    ids=["step", "quiet step", "insert"],
)
def test_three_percent_slower_never_passes_for_the_same(scenario: Scenario) -> None:
    found = verdicts(scenario)
    assert found["SLOWER"] + found["AMBIGUOUS"] >= 0.95


@with_and_without_rerun
@pytest.mark.parametrize("cv", [0.01, 0.1])
def test_identical_code_is_not_called_slower_however_noisy(cv: float, rerun: bool) -> None:
    assert verdicts(Scenario(DECODE, cv, 0.0), rerun=rerun)["SLOWER"] < 0.01


def test_identical_code_is_the_same_when_quiet_or_run_again() -> None:
    assert verdicts(Scenario(DECODE, 0.005, 0.0))["SAME"] >= 0.99
    once = verdicts(Scenario(DECODE, 0.01, 0.0))["SAME"]
    assert verdicts(Scenario(DECODE, 0.01, 0.0), rerun=True)["SAME"] > once


def test_noise_leaves_a_slowdown_ambiguous_not_the_same() -> None:
    found = verdicts(Scenario(STEP, 0.1, 0.03))
    assert found["SAME"] + found["FASTER"] < 0.06  # the room's 5 %, and chance
    assert found["AMBIGUOUS"] > 0.9


def test_below_twelve_microseconds_a_few_percent_are_ambiguous() -> None:
    found = verdicts(Scenario(DECODE, 0.01, 0.05, us=4.0))
    assert found["AMBIGUOUS"] >= 0.99
    as_recorded = verdicts(Scenario(TOPK, 0.01, 0.05))  # its own dispersion is 1.4 %
    assert as_recorded["AMBIGUOUS"] > 0.8
    assert as_recorded["SAME"] + as_recorded["FASTER"] < 0.01


def test_a_large_slowdown_of_a_short_op_is_found_all_the_same() -> None:
    assert verdicts(Scenario(TOPK, 0.01, 0.15))["SLOWER"] >= 0.99
