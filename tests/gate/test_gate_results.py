"""What is no time: results, errors, kernels, and the environments that runs come from."""

from __future__ import annotations

import pytest
from gate_runs import (
    BASE,
    CLOCK,
    PREFILL,
    SLOWER,
    baseline,
    codes,
    measurement,
    only,
    processes,
    row,
    run,
    times,
    times_of,
)

from megabench.gate import Policy, baseline_of, compare
from megabench.results import Run, StageResult, Telemetry

POLICY = Policy()


# ---- correctness and kernels -------------------------------------------------


def test_one_failing_process_of_five_is_broken() -> None:
    failed = row(status="failed", reason="out: 3 of 9 wrong")
    runs = [*processes(BASE[:4]), run([failed])]
    result = compare(baseline(), runs, POLICY)
    (finding,) = result.findings
    assert finding.decision.verdict == "BROKEN"
    assert "in 1 of 5 processes" in finding.decision.message
    assert result.exit_code == 1


def test_a_new_case_that_fails_is_broken_not_new() -> None:
    failed = row(status="failed", reason="out", case=PREFILL)
    runs = [run([row([measurement(us)]), failed]) for us in BASE]
    assert ("BROKEN", "failed") in codes(compare(baseline(), runs, POLICY))


def test_outputs_that_change_while_timed_are_broken() -> None:
    runs = processes(BASE, rechecked=False, problem="outputs differ after timing")
    result = compare(baseline(), runs, POLICY)
    assert codes(result) == {("BROKEN", "recheck")}


def test_outputs_that_nobody_vouches_for_are_broken() -> None:
    (finding,) = compare(baseline(), processes(BASE, rechecked=False), POLICY).findings[:1]
    assert (finding.decision.verdict, finding.decision.code) == ("BROKEN", "recheck")
    assert "outputs after timing are not vouched for" in finding.decision.message


def test_a_stage_that_is_not_ok_is_broken_whatever_the_case_says() -> None:
    wrong = StageResult(name="out", ok=False, checked=9, worst=0.4, message="3 of 9 wrong")
    runs = [*processes(BASE[:4]), run([row([measurement(BASE[4])], stages=[wrong])])]
    result = compare(baseline(), runs, POLICY)
    assert codes(result) == {("BROKEN", "failed")}
    assert "3 of 9 wrong" in result.findings[0].decision.message


def test_a_wrong_output_is_broken_though_some_samples_were_throttled() -> None:
    throttled = Telemetry(source="nvml", invalid="hardware slowdown")
    runs = processes(BASE, rechecked=False, problem="outputs differ", telemetry=throttled)
    assert codes(compare(baseline(), runs, POLICY)) == {("BROKEN", "recheck")}


def test_a_case_that_raised_after_a_time_that_cannot_be_true_is_broken() -> None:
    false = measurement(1.0, op="wq_b", problem="below the datasheet's floor")
    rows = [
        row([false, measurement(us)], status="error", reason="wo_a: RuntimeError: boom")
        for us in BASE
    ]
    result = compare(baseline(), [run([r]) for r in rows], POLICY)
    assert codes(result) == {("BROKEN", "error")}
    assert "boom" in result.findings[0].decision.message


def test_a_grown_error_is_broken() -> None:
    runs = [run([row([measurement(us)], worst=0.9)]) for us in BASE]
    result = compare(baseline(), runs, POLICY)
    assert ("BROKEN", "error-growth") in codes(result)
    assert result.exit_code == 1


def test_figures_beside_the_verdict_are_not_gated() -> None:
    def chained(worst: float) -> list[Run]:
        chain = StageResult(name="end_to_end", ok=True, checked=1, worst=worst, verdict=False)
        out = StageResult(name="out", ok=True, checked=9, worst=0.4)
        return [run([row([measurement(us)], stages=[out, chain])]) for us in BASE]

    assert compare(baseline_of(chained(1.0)), chained(50.0), POLICY).exit_code == 0


def test_a_run_that_validated_nothing_cannot_pass_for_a_correct_one() -> None:
    runs = [run([row([measurement(us)], worst=None)]) for us in BASE]
    result = compare(baseline(), runs, POLICY)
    assert ("MISSING", "not-validated") in codes(result)


@pytest.mark.parametrize("column", ["warm", "eager"])
def test_one_kernel_more_a_step_is_slower_whatever_row_of_a_run_counts_them(column: str) -> None:
    """Runs of earlier versions count them in the eager row."""

    def counted(kernels: int | None, column: str = "warm") -> list[Run]:
        times = {"cold": None, "warm": None, "eager": None} | {column: kernels}
        rows = [measurement(90.0, column=name, kernels=n) for name, n in times.items()]
        return [run([row(rows)]) for _ in BASE]

    recorded = baseline_of(counted(7, column))
    assert only(compare(recorded, counted(7), POLICY), "kernels").decision.verdict == "SAME"
    more = compare(recorded, counted(8), POLICY)
    assert only(more, "kernels").decision.message == "7 -> 8 kernels"
    assert more.exit_code == 1
    assert only(compare(recorded, counted(None), POLICY), "kernels").decision.code == "missing"


# ---- environments ------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("driver", "590.2"),
        ("weights", "0123456789abcdef"),
        ("device_name", "NVIDIA B200"),
        ("packages", {"torch": "2.12.0", "triton": "3.6.0"}),
    ],
)
def test_another_environment_is_a_verdict_and_no_time_is_compared(
    field: str, value: object
) -> None:
    runs = [run([row([measurement(us)])], **{field: value}) for us in SLOWER]
    result = compare(baseline(), runs, POLICY)
    assert ("INVALID", "environment") in codes(result)
    assert times_of(result) == []
    assert result.exit_code == 3


def test_the_errors_of_other_weights_are_not_held_to_the_baselines() -> None:
    grown = times(5, [row(worst=0.9)])
    assert compare(baseline(), grown, POLICY).exit_code == 1
    other = compare(baseline(), times(5, [row(worst=0.9)], weights="0123456789abcdef"), POLICY)
    assert [code for code in codes(other) if code[0] == "BROKEN"] == []
    assert other.exit_code == 3


def test_another_environment_does_not_hide_a_wrong_result() -> None:
    runs = times(5, [row(status="failed", reason="out")], driver="590.2")
    assert compare(baseline(), runs, POLICY).exit_code == 1


def test_what_the_policy_ignores_may_differ() -> None:
    runs = [run([row([measurement(us)])], driver="590.2") for us in SLOWER]
    policy = Policy.model_validate({"environment": {"ignore": ["driver"]}})
    assert only(compare(baseline(), runs, policy)).decision.verdict == "SLOWER"


def test_another_host_matters_to_host_timed_columns_alone() -> None:
    runs = [run([row([measurement(us)])], cpu="another", cpu_count=8) for us in SLOWER]
    policy = Policy(columns=["cold"])
    assert only(compare(baseline(), runs, policy)).decision.verdict == "SLOWER"
    host = [run([row([measurement(us, column="cpu")])], cpu="another") for us in SLOWER]
    recorded = baseline(column="cpu")
    assert ("INVALID", "environment") in codes(compare(recorded, host, POLICY))


def test_locked_clocks_are_not_compared_with_free_ones() -> None:
    locked = Telemetry(source="nvml", sm_clock_mhz=CLOCK, labels=["application clocks setting"])
    result = compare(baseline(), processes(BASE, telemetry=locked), POLICY)
    finding = only(result, "environment")
    assert "clocks default -> application" in finding.decision.message
