"""Each verdict needs all of its grounds: take one away and the gate says what is missing."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.gate.policy import CorrectnessRule, KernelRule, TimeRule
from megabench.gate.pool import Change, Pairs, Times, compare_pairs
from megabench.gate.verdicts import (
    ORDER,
    Decision,
    Verdict,
    decide,
    exit_code,
    judge_kernels,
    judge_pairs,
    judge_stages,
    judge_time,
)

RULE = TimeRule()
SLOW = Change(base_us=20, run_us=21, relative=0.05, apart=True, room=0.06, cycles=0.05)
CALM = Change(base_us=20, run_us=20.1, relative=0.005, apart=False, room=0.01, cycles=0.005)
FAST = Change(base_us=20, run_us=19, relative=-0.05, apart=True, room=-0.04, cycles=-0.05)
NOISE = (0.0, 0.004, -0.004, 0.002, -0.002)


def times(us: float, noise: float = 1.0, clock: float | None = 1755.0) -> Times:
    medians = tuple(us * (1 + noise * n) for n in NOISE)
    return Times(medians, () if clock is None else (clock,) * 5)


def codes(decision: Decision) -> tuple[str, str]:
    return decision.verdict, decision.code


# ---- one change --------------------------------------------------------------


def test_slower_needs_thresholds_intervals_and_cycles_together() -> None:
    assert codes(decide(SLOW, RULE)) == ("SLOWER", "slower")
    lacking = {
        "below-resolution": replace(SLOW, base_us=5, run_us=5.25),
        "overlap": replace(SLOW, apart=False),
        "clock": replace(SLOW, cycles=0.01),
        "noisy": replace(SLOW, relative=0.02, cycles=0.02),
    }
    for code, change in lacking.items():
        assert codes(decide(change, RULE)) == ("AMBIGUOUS", code)


def test_an_unknown_clock_does_not_hide_a_slowdown_but_is_said() -> None:
    decision = decide(replace(SLOW, cycles=None), RULE)
    assert decision.verdict == "SLOWER"
    assert "no clock known" in decision.message


def test_faster_needs_the_same_grounds_and_is_else_just_not_slower() -> None:
    assert codes(decide(FAST, RULE)) == ("FASTER", "faster")
    for weaker in (
        replace(FAST, apart=False),
        replace(FAST, base_us=5, run_us=4.75),
        replace(FAST, cycles=0.0),
    ):
        assert codes(decide(weaker, RULE)) == ("SAME", "not-slower")
    assert codes(decide(replace(FAST, room=0.03), RULE)) == ("AMBIGUOUS", "noisy")


def test_same_means_that_no_slowdown_of_the_threshold_fits_the_samples() -> None:
    assert codes(decide(CALM, RULE)) == ("SAME", "same")
    assert codes(decide(replace(CALM, room=0.026), RULE)) == ("AMBIGUOUS", "noisy")


def test_a_higher_clock_does_not_pass_for_the_same_speed() -> None:
    assert codes(decide(replace(CALM, cycles=0.03), RULE)) == ("AMBIGUOUS", "clock-hides")


@settings(deadline=None, max_examples=200)
@given(
    st.floats(1, 1e4),
    st.floats(-0.5, 0.5),
    st.booleans(),
    st.floats(0, 0.5),
    st.none() | st.floats(-0.5, 0.5),
)
def test_a_verdict_is_never_better_than_its_grounds(
    base: float, relative: float, apart: bool, spread: float, cycles: float | None
) -> None:
    change = Change(base, base * (1 + relative), relative, apart, relative + spread, cycles)
    verdict = decide(change, RULE).verdict
    if verdict == "SLOWER":
        assert relative >= RULE.relative
        assert change.absolute_us >= RULE.absolute_us
        assert apart
        assert cycles is None or cycles >= RULE.relative
    if verdict in ("SAME", "FASTER"):
        assert relative < RULE.relative
        assert change.room < RULE.relative


# ---- processes and re-runs ---------------------------------------------------


@pytest.mark.parametrize(("base", "run"), [(5, 4), (4, 5), (1, 1)])
def test_fewer_processes_than_wanted_are_ambiguous_even_when_nothing_moved(
    base: int, run: int
) -> None:
    decision = judge_time(Times((20.0,) * base), Times((20.0,) * run), RULE, 5)
    assert codes(decision) == ("AMBIGUOUS", "few-processes")


def test_a_policy_may_want_more_processes_than_an_interval_needs() -> None:
    decision = judge_time(times(20), times(20), RULE, 7)
    assert codes(decision) == ("AMBIGUOUS", "few-processes")
    assert decision.message == "the run has 5 of 7 processes"


def test_a_slowdown_that_the_rerun_repeats_is_slower() -> None:
    decision = judge_time(times(20), times(21), RULE, 5, times(21.1))
    assert codes(decision) == ("SLOWER", "slower")
    assert "the re-run agrees" in decision.message


@pytest.mark.parametrize("again", [20.0, 20.4])
def test_a_slowdown_that_the_rerun_does_not_repeat_is_ambiguous(again: float) -> None:
    assert judge_time(times(20), times(21), RULE, 5).verdict == "SLOWER"
    decision = judge_time(times(20), times(21), RULE, 5, times(again))
    assert codes(decision) == ("AMBIGUOUS", "not-reproduced")


def test_a_rerun_settles_what_one_straggling_process_blurred() -> None:
    base = times(20)
    straggling = Times((21.0, 21.02, 20.98, 21.01, 19.5), (1755.0,) * 5)
    assert codes(judge_time(base, straggling, RULE, 5)) == ("AMBIGUOUS", "overlap")
    assert judge_time(base, straggling, RULE, 5, times(21)).verdict == "SLOWER"


def test_a_rerun_never_makes_a_clean_run_slower_by_itself() -> None:
    assert judge_time(times(20), times(20), RULE, 5, times(22)).verdict != "SLOWER"


# ---- pairs -------------------------------------------------------------------


def test_pairs_are_judged_by_their_ratio_to_the_reference() -> None:
    base = Pairs(0.50, 0.498, 0.502, 20)
    slower, same = Pairs(0.53, 0.528, 0.532, 20), Pairs(0.501, 0.499, 0.503, 20)
    assert judge_pairs(base, slower, compare_pairs(base, slower, 40), RULE).verdict == "SLOWER"
    assert judge_pairs(base, same, compare_pairs(base, same, 40), RULE).verdict == "SAME"
    assert codes(judge_pairs(base, slower, compare_pairs(base, slower, 4), RULE)) == (
        "AMBIGUOUS",
        "below-resolution",
    )


# ---- kernels, correctness, exit codes ----------------------------------------


def test_one_kernel_more_is_slower_unless_the_policy_allows_it() -> None:
    assert judge_kernels(7, {8}, KernelRule()).verdict == "SLOWER"
    assert judge_kernels(7, {8}, KernelRule(extra=1)).verdict == "SAME"
    assert judge_kernels(7, {6}, KernelRule()).verdict == "FASTER"
    assert judge_kernels(7, {7}, KernelRule()).verdict == "SAME"
    assert judge_kernels(7, {7, 8}, KernelRule()).verdict == "AMBIGUOUS"


def test_a_grown_error_is_broken_although_it_is_within_its_bound() -> None:
    rule = CorrectnessRule()
    assert judge_stages({"out": 0.3}, {"out": 0.5}, rule).verdict == "SAME"
    grown = judge_stages({"lse": 0.0, "out": 0.3}, {"lse": 0.0, "out": 0.6}, rule)
    assert codes(grown) == ("BROKEN", "error-growth")
    assert "out" in grown.message
    assert judge_stages({"out": 0.3}, {"out": math.nan}, rule).verdict == "BROKEN"


def test_a_stage_that_was_not_validated_is_missing() -> None:
    decision = judge_stages({"lse": 0.1, "out": 0.3}, {"lse": 0.1}, CorrectnessRule())
    assert codes(decision) == ("MISSING", "not-validated")


def test_the_worst_verdict_decides_the_exit_code() -> None:
    wanted: dict[Verdict, int] = {
        "SAME": 0,
        "FASTER": 0,
        "NEW": 0,
        "AMBIGUOUS": 3,
        "MISSING": 3,
        "INVALID": 3,
        "SLOWER": 1,
        "BROKEN": 1,
    }
    assert set(wanted) == set(ORDER)
    assert exit_code([]) == 0
    for one, other in product(wanted, wanted):
        codes = {wanted[one], wanted[other]}
        assert exit_code([one, other]) == (1 if 1 in codes else max(codes))
