"""What the first screen says: verdict, counts, and the best and worst figures of a run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from megabench.report.frames import anchor, primary, worst_stage
from megabench.results import CaseResult, Run
from megabench.results.names import STEP

Tone = Literal["good", "bad", "warn", "none"]
STATUSES = ("passed", "measured", "failed", "error", "skipped")


@dataclass(frozen=True)
class Extreme:
    """One case at an end of a scale."""

    value: float
    label: str
    """What of the case: a stage or an op."""
    case: CaseResult
    anchor: str


@dataclass(frozen=True)
class StageLine:
    """One stage over all cases of a run."""

    name: str
    cases: int
    failed: int
    checked: int
    worst: float | None
    worst_case: str
    anchor: str
    verdict: bool


@dataclass(frozen=True)
class Summary:
    """The first screen."""

    tone: Tone
    headline: str
    counts: dict[str, int]
    """Rows by status, every status present."""
    reasons: list[tuple[str, int]]
    """Why rows were skipped, most frequent first."""
    missing: int
    """Rows the run set out to write and did not."""
    worst_ratio: Extreme | None
    best_fraction: Extreme | None
    worst_fraction: Extreme | None
    problems: list[tuple[str, str, str]]
    """(anchor, case and backend, what is wrong) of failed and broken rows."""


def summarise(run: Run) -> Summary:
    """The summary of a run; every part copes with having nothing to say."""
    counts = {status: 0 for status in STATUSES} | Counter(case.status for case in run.cases)
    planned = run.header.planned if run.header else None
    missing = max((planned or 0) - len(run.cases), 0)
    skipped = Counter(case.reason for case in run.cases if case.status == "skipped")
    fractions = _fractions(run)
    checked = any(case.stages or case.status == "failed" for case in run.cases)
    tone, headline = _verdict(counts, missing, checked)
    return Summary(
        tone=tone,
        headline=headline,
        counts=counts,
        reasons=skipped.most_common(),
        missing=missing,
        worst_ratio=max(_ratios(run), key=lambda e: _order(e.value), default=None),
        best_fraction=max(fractions, key=lambda e: e.value, default=None),
        worst_fraction=min(fractions, key=lambda e: e.value, default=None),
        problems=[
            (anchor(i), f"{case.case_id} on {case.backend}", case.reason)
            for i, case in enumerate(run.cases)
            if case.status in ("failed", "error")
        ],
    )


def _verdict(counts: dict[str, int], missing: int, checked: bool) -> tuple[Tone, str]:
    """`checked` is False where the run compared nothing with the golden model."""
    right = counts["passed"] + counts["measured"]
    judged = right + counts["failed"] + counts["error"]
    wrong = judged - right
    if not judged:
        return "warn", "Nothing ran" if not counts["skipped"] else "Every case was skipped"
    if wrong:
        return "bad", f"{wrong} of {judged} case{_s(judged)} wrong"
    if missing:
        return "warn", f"Cut short: {judged} case{_s(judged)} right, {missing} never ran"
    if not checked:
        return "warn", f"{judged} case{_s(judged)} measured, none checked"
    return "good", f"All {judged} case{_s(judged)} right" if judged > 1 else "The case is right"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _ratios(run: Run) -> list[Extreme]:
    found = []
    for i, case in enumerate(run.cases):
        stage = worst_stage(case)
        if stage is not None and stage.worst is not None:
            found.append(Extreme(stage.worst, stage.name, case, anchor(i)))
    return found


def _fractions(run: Run) -> list[Extreme]:
    """Roofline fractions of whole steps whose numbers stand."""
    found = []
    for i, case in enumerate(run.cases):
        step = primary(case, STEP)
        if step is not None and step.roofline_fraction is not None and not step.problem:
            found.append(Extreme(step.roofline_fraction, step.column, case, anchor(i)))
    return found


def stage_lines(run: Run) -> list[StageLine]:
    """Stages over all cases, in the order cases report them."""
    names = dict.fromkeys(stage.name for case in run.cases for stage in case.stages)
    return [_stage_line(run, name) for name in names]


def _stage_line(run: Run, name: str) -> StageLine:
    found = [(i, c, s) for i, c in enumerate(run.cases) for s in c.stages if s.name == name]
    index, case, worst = max(found, key=lambda f: (not f[2].ok, _order(f[2].worst or 0.0)))
    return StageLine(
        name=name,
        cases=len(found),
        failed=sum(not stage.ok for _, _, stage in found),
        checked=sum(stage.checked for _, _, stage in found),
        worst=worst.worst,
        worst_case=f"{case.case_id} on {case.backend}",
        anchor=anchor(index),
        verdict=worst.verdict,
    )
