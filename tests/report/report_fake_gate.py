"""A fake run of five processes and its baseline, with every verdict the gate has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from report_fake_run import case, ceilings, header, measurement

from megabench.gate import Policy, baseline_of, compare
from megabench.gate.kept import Verdicts, verdicts_of
from megabench.report.html import render
from megabench.report.pooled import pooled
from megabench.report.verdict import gate_view
from megabench.results import CaseResult, Run, RunEnd, StageResult

SPREAD = (1.0, 1.004, 0.996, 1.002, 0.998)
"""Of five processes; small enough for SAME."""


def process(rows: list[CaseResult], driver: str = "580") -> Run:
    run = Run(Path("run/process"), header=header(planned=len(rows)), ceilings=ceilings())
    assert run.header is not None
    run.header.environment.driver = driver
    run.header.environment.compute_capability = "9.0"
    run.cases = rows
    run.end = RunEnd(finished="now", seconds=2.0, rows=len(rows))
    return run


def judged(tokens: int, us: float, kernels: int = 3, worst: float = 0.2) -> CaseResult:
    """A validated case with one op besides its step."""
    step = measurement("step", us)
    step.kernels = kernels
    step.rechecked = True
    op = measurement("wo_a", us / 4)
    op.rechecked = True
    stages = [
        StageResult(name="lse", ok=True, checked=64, worst=0.0),
        StageResult(name="output_values", ok=True, checked=64, worst=worst),
    ]
    return case(tokens, stages=stages, measurements=[step, op])


def base_rows(spread: float) -> list[CaseResult]:
    return [judged(tokens, 40 * spread) for tokens in (1, 2, 3, 4, 5, 6, 7, 8)]


def now_rows(spread: float) -> list[CaseResult]:
    throttled = judged(8, 40 * spread)
    for row in throttled.measurements:
        row.problem = "HW slowdown in 5 of 5 blocks"
    return [
        judged(1, 40 * spread),  # SAME
        judged(2, 42 * spread),  # SLOWER
        judged(3, 36 * spread),  # FASTER
        judged(4, 40 * (1 + 8 * (spread - 1))),  # AMBIGUOUS
        judged(5, 40 * spread, kernels=4, worst=0.8),  # one kernel more, a grown error
        case(6, status="failed", reason="lse: head 3 <off>"),  # BROKEN
        throttled,  # INVALID
        judged(9, 40 * spread),  # NEW; 7 is MISSING
    ]


def processes(rows: Callable[[float], list[CaseResult]], driver: str = "580") -> list[Run]:
    return [process(rows(spread), driver) for spread in SPREAD]


def verdicts(runs: list[Run]) -> Verdicts:
    """Of `runs` against the baseline above, as the gate keeps them."""
    result = compare(baseline_of(processes(base_rows)), runs, Policy())
    return verdicts_of(result, Path("reports/baselines"))


def gated_page(driver: str = "580") -> str:
    """The report of the run above, gated."""
    runs = processes(now_rows, driver)
    kept, run = verdicts(runs), pooled(runs)
    return render(run, gate_view(kept, run, kept.header.rows), len(runs))
