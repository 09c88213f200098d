"""A run against its baseline: nothing goes unmentioned, and nothing passes by luck."""

from __future__ import annotations

import pytest
from gate_runs import (
    BASE,
    CLOCK,
    DECODE,
    PREFILL,
    SLOWER,
    baseline,
    codes,
    measurement,
    only,
    processes,
    ratio,
    row,
    run,
    times,
    times_of,
)

from megabench.gate import Policy, baseline_of, compare
from megabench.results import CaseResult, Run, Telemetry

POLICY = Policy()


# ---- times -------------------------------------------------------------------


def test_identical_runs_are_the_same_and_exit_zero() -> None:
    result = compare(baseline(), processes(BASE), POLICY)
    assert result.counts() == {"SAME": 2}  # the step's time, and the case's correctness
    assert result.exit_code == 0


def test_a_slower_run_exits_one_and_says_by_how_much() -> None:
    result = compare(baseline(), processes(SLOWER), POLICY)
    finding = only(result)
    assert finding.decision.verdict == "SLOWER"
    assert "+5.00 %" in finding.decision.message
    assert result.exit_code == 1
    assert result.run_again() == [(DECODE.id, "triton")]


def test_a_faster_run_exits_zero() -> None:
    result = compare(baseline(), processes([0.9 * t for t in BASE]), POLICY)
    assert only(result).decision.verdict == "FASTER"
    assert result.exit_code == 0


def test_a_lower_clock_is_not_a_slower_kernel() -> None:
    result = compare(baseline(), processes(SLOWER, clock=CLOCK / 1.05), POLICY)
    assert only(result).decision.code == "clock"
    assert result.exit_code == 3


def test_without_clocks_the_evidence_says_that_cycles_were_not_checked() -> None:
    recorded = baseline(clock=None)
    finding = only(compare(recorded, processes(SLOWER, clock=None), POLICY))
    assert finding.decision.verdict == "SLOWER"
    assert any("SM clock is not known" in line for line in finding.evidence)


def test_one_process_is_ambiguous_whatever_it_says() -> None:
    for us in (20.0, 30.0):
        result = compare(baseline(), processes([us]), POLICY)
        assert only(result).decision.code == "few-processes"
        assert result.exit_code == 3


def test_a_rerun_that_disagrees_keeps_slower_back() -> None:
    agrees = compare(baseline(), processes(SLOWER), POLICY, processes(SLOWER))
    assert only(agrees).decision.verdict == "SLOWER"
    disagrees = compare(baseline(), processes(SLOWER), POLICY, processes(BASE))
    assert only(disagrees).decision.code == "not-reproduced"
    assert any(line.startswith("re-run") for line in only(disagrees).evidence)
    assert only(disagrees).run_us == pytest.approx((20.895 + 20.1) / 2)  # of both runs together


def test_columns_are_never_compared_with_each_other() -> None:
    result = compare(baseline(), processes(BASE, column="warm"), POLICY)
    assert {(f.column, f.decision.verdict) for f in times_of(result)} == {
        ("cold", "MISSING"),
        ("warm", "NEW"),
    }


def test_eager_times_are_not_gated() -> None:
    recorded = baseline(column="eager")
    assert times_of(compare(recorded, processes(SLOWER, column="eager"), POLICY)) == []


def test_a_rule_that_is_not_gated_reports_without_deciding() -> None:
    policy = Policy.model_validate({"rules": [{"op": "step", "gated": False}]})
    result = compare(baseline(), processes(SLOWER), policy)
    assert only(result).decision.verdict == "SLOWER"
    assert result.exit_code == 0
    assert result.run_again() == []


def test_a_case_glob_widens_its_threshold_alone() -> None:
    both = [
        [row([measurement(us)]), row([measurement(us)], case=PREFILL)] for us in (*BASE, *SLOWER)
    ]
    runs = [run(rows) for rows in both]
    policy = Policy.model_validate({"rules": [{"case": PREFILL.id, "relative": 0.1}]})
    result = compare(baseline_of(runs[:5]), runs[5:], policy)
    found = {f.case_id: f.decision.verdict for f in times_of(result)}
    assert found[DECODE.id] == "SLOWER"
    assert found[PREFILL.id] != "SLOWER"


def test_the_idle_rules_of_a_policy_are_noted() -> None:
    policy = Policy.model_validate({"rules": [{"op": "stop"}]})
    assert compare(baseline(), processes(BASE), policy).notes == [
        "rules.0 (op stop) matches nothing in this run"
    ]


# ---- pairs -------------------------------------------------------------------


def paired(value: float, us: float = 20.0, pairs: int = 12, **fields: str) -> list[Run]:
    return [run([row([measurement(us, **fields)])], [ratio(value, pairs)])]


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
def test_a_ratio_that_is_none_stands_in_for_nothing(value: float) -> None:
    result = compare(baseline_of(paired(0.5)), paired(value), POLICY)
    assert only(result).decision.code == "few-processes"


def test_no_ratio_stands_in_for_a_time_that_cannot_be_true() -> None:
    false = paired(0.5, problem="below the datasheet's floor")
    assert only(compare(baseline_of(paired(0.5)), false, POLICY)).decision.code == "invalid"


def test_pairs_stand_in_for_processes_and_ignore_what_slows_both_arms() -> None:
    recorded = baseline_of(paired(0.5))
    drifted = only(compare(recorded, paired(0.5, us=22.0), POLICY))
    assert drifted.decision.verdict == "SAME"
    slower = only(compare(recorded, paired(0.53), POLICY))
    assert slower.decision.verdict == "SLOWER"
    assert any("x torch" in line for line in slower.evidence)


def test_too_few_pairs_do_not() -> None:
    found = only(compare(baseline_of(paired(0.5)), paired(0.53, pairs=3), POLICY))
    assert found.decision.code == "few-processes"


# ---- what is not there, or not the same --------------------------------------


def test_a_missing_and_a_new_case_are_both_named() -> None:
    runs = times(5, [row([measurement(20.0)], case=PREFILL)])
    result = compare(baseline(), runs, POLICY)
    found = {f.case_id: f.decision.verdict for f in result.findings}
    assert found == {DECODE.id: "MISSING", PREFILL.id: "NEW"}
    assert result.exit_code == 3


def test_a_part_of_a_suite_may_be_gated_but_not_none_of_it() -> None:
    ignoring = Policy(missing="ignore")
    both = [[row([measurement(us)]), row([measurement(us)], case=PREFILL)] for us in BASE]
    whole = baseline_of([run(rows) for rows in both])
    assert compare(whole, processes(BASE), ignoring).exit_code == 0
    other = compare(baseline(), times(5, [row([measurement(20.0)], case=PREFILL)]), ignoring)
    assert [f.decision.verdict for f in other.findings] == ["NEW"]
    assert other.exit_code == 3
    assert "nothing was compared" in other.notes[-1]


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (row([measurement(20.0)], worst=None), "not-validated"),
        (row(status="skipped", reason="no sm_90 cubin"), "skipped"),
        (row([measurement(20.0, op="wo_a")]), "missing"),
    ],
)
def test_what_a_case_that_ran_no_longer_has_is_never_ignored(now: CaseResult, code: str) -> None:
    result = compare(baseline(), times(5, [now]), Policy(missing="ignore"))
    assert ("MISSING", code) in codes(result)
    assert result.exit_code == 3


def test_a_case_skipped_now_is_missing_with_its_reason() -> None:
    runs = times(5, [row(status="skipped", reason="no sm_90 cubin")])
    (finding,) = compare(baseline(), runs, POLICY).findings
    assert (finding.decision.verdict, finding.decision.code) == ("MISSING", "skipped")
    assert "no sm_90 cubin" in finding.decision.message


def test_a_case_that_changed_under_its_name_is_invalid() -> None:
    runs = times(5, [row([measurement(20.0)], case_hash="0" * 16)])
    (finding,) = compare(baseline(), runs, POLICY).findings
    assert finding.decision.code == "case-changed"


def test_a_time_that_cannot_be_true_is_invalid() -> None:
    runs = processes(BASE, problem="below the datasheet's floor")
    finding = only(compare(baseline(), runs, POLICY))
    assert (finding.decision.verdict, finding.decision.code) == ("INVALID", "invalid")
    assert "below the datasheet's floor" in finding.decision.message


@pytest.mark.parametrize("us", [0.0, float("nan"), float("inf"), 1e-300, 1e300])
def test_a_median_that_is_no_time_is_told_and_not_left_out(us: float) -> None:
    for medians in ([us] * 5, [*BASE[:4], us]):
        finding = only(compare(baseline(), processes(medians), POLICY))
        assert (finding.decision.verdict, finding.decision.code) == ("INVALID", "invalid")
        assert "is no time" in finding.decision.message


@pytest.mark.parametrize("clock", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_is_none_is_not_known(clock: float) -> None:
    finding = only(compare(baseline(), processes(SLOWER, clock=clock), POLICY))
    assert finding.decision.verdict == "SLOWER"
    assert "no clock known" in finding.decision.message


def test_a_new_time_that_cannot_be_true_is_invalid_not_new() -> None:
    false = {"op": "wo_a", "problem": "below the datasheet's floor"}
    rows = [row([measurement(us), measurement(us, **false)]) for us in BASE]
    new_op = compare(baseline(), [run([r]) for r in rows], POLICY)
    assert ("INVALID", "invalid") in codes(new_op)
    new_case = compare(
        baseline([20.0]), [run([row(r.measurements, PREFILL)]) for r in rows], POLICY
    )
    assert ("INVALID", "invalid") in codes(new_case)


def test_what_to_do_about_a_verdict_that_says_nothing_of_the_code_is_noted_once() -> None:
    few = compare(baseline(), processes(BASE[:2]), POLICY)
    assert few.notes == [
        "few-processes: bench --processes 5 makes a run that can be judged, "
        "and a baseline that runs can be judged by"
    ]
    elsewhere = compare(
        baseline(), [run([row([measurement(t)])], driver="590") for t in BASE], POLICY
    )
    assert [note.split(":")[0] for note in elsewhere.notes] == ["environment"]
    assert compare(baseline(), processes(BASE), POLICY).notes == []
    two = [run([row([measurement(t), measurement(t, op="wo_a")])]) for t in BASE]
    one_op_less = compare(baseline_of(two), processes(BASE), POLICY)
    assert ("MISSING", "missing") in codes(one_op_less)
    assert one_op_less.notes == []  # `missing: ignore` is of whole cases


def test_one_throttled_process_of_six_does_not_matter() -> None:
    throttled = Telemetry(source="nvml", invalid="hardware slowdown")
    bad = measurement(30.0, problem="fell under", telemetry=throttled)
    runs = [*processes(BASE), run([row([bad], status="error", reason="step (cold): fell under")])]
    assert only(compare(baseline(), runs, POLICY)).decision.verdict == "SAME"
    fewer = compare(baseline(), runs[1:], POLICY)
    assert only(fewer).decision.verdict == "INVALID"


def test_a_process_with_fewer_cases_than_it_tells_of_was_cut_short() -> None:
    whole = processes(BASE)
    for change in ({"planned": 2}, None):
        short = run([row([measurement(20.0)])])
        assert short.header is not None
        assert short.end is not None
        if change:
            short.header = short.header.model_copy(update=change)
        else:
            short.end = short.end.model_copy(update={"rows": 2})
        assert ("INVALID", "cut-short") in codes(compare(baseline(), [*whole, short], POLICY))
    torn = run([row([measurement(20.0)])])
    torn.torn = True
    assert ("INVALID", "cut-short") in codes(compare(baseline(), [*whole, torn], POLICY))


def test_a_process_that_crashed_is_told_even_when_the_rest_is_enough() -> None:
    runs = [*processes(BASE), run([], ended=False)]
    result = compare(baseline(), runs, POLICY)
    assert ("INVALID", "cut-short") in codes(result)
    assert result.exit_code == 3
