"""The gate's verdicts as the report shows them; nothing is judged here."""

from __future__ import annotations

from dataclasses import dataclass

from megabench.gate.kept import FindingRow, Verdicts, VerdictsHeader
from megabench.gate.verdicts import EXIT_GOOD, EXIT_WRONG, UNDECIDED, WRONG, Verdict
from megabench.report.frames import anchor
from megabench.report.summary import Tone
from megabench.report.words import NONE, digits, microseconds
from megabench.results import Run

MARKS: dict[Verdict, str] = {
    "BROKEN": "✗",
    "SLOWER": "▲",
    "INVALID": "!",
    "MISSING": "?",
    "AMBIGUOUS": "~",
    "NEW": "+",
    "FASTER": "▼",
    "SAME": "=",
}
"""Beside the word, so that verdicts are told apart at a glance without their colours."""
_OUTCOME: dict[int, tuple[Tone, str]] = {
    EXIT_GOOD: ("good", "Nothing gated is slower or broken"),
    EXIT_WRONG: ("bad", "Slower or broken"),
}
_UNDECIDED: tuple[Tone, str] = ("warn", "Cannot decide")


@dataclass(frozen=True)
class GateLine:
    """A finding in a table's words, and what its columns sort by."""

    row: FindingRow
    mark: str
    tone: Tone
    rank: int
    """Worst verdicts first."""
    anchor: str | None
    """The case's detail below, if the run has the case."""
    base: str
    now: str
    ratio: str
    interval: str
    """Empty where there is none."""
    cycles: str


@dataclass(frozen=True)
class Count:
    """How many findings have a verdict."""

    verdict: Verdict
    count: int
    mark: str
    tone: Tone


@dataclass(frozen=True)
class GateView:
    """All the report shows of a gate."""

    header: VerdictsHeader
    tone: Tone
    outcome: str
    counts: list[Count]
    """Worst verdict first."""
    lines: list[GateLine]
    grown: bool
    """The run has other rows than those that were judged."""


def gate_view(verdicts: Verdicts, run: Run, rows: int) -> GateView:
    """The verdicts on `run`, whose processes now have `rows` case rows in all."""
    tone, outcome = _OUTCOME.get(verdicts.header.exit_code, _UNDECIDED)
    anchors = {(c.case_id, c.backend): anchor(i) for i, c in enumerate(run.cases)}
    return GateView(
        header=verdicts.header,
        tone=tone,
        outcome=outcome,
        counts=[
            Count(verdict, count, MARKS[verdict], tone_of(verdict))
            for verdict, count in verdicts.counts().items()
        ],
        lines=[
            _line(finding, rank, anchors.get((finding.case_id, finding.backend)))
            for rank, finding in enumerate(verdicts.findings)
        ],
        grown=rows != verdicts.header.rows,
    )


def _line(row: FindingRow, rank: int, found: str | None) -> GateLine:
    timed = row.base_us is not None or row.run_us is not None
    interval = ""
    if row.ratio_low is not None and row.ratio_high is not None:
        interval = f"{digits(row.ratio_low, 4)} … {digits(row.ratio_high, 4)}"
    return GateLine(
        row=row,
        mark=MARKS[row.verdict],
        tone=tone_of(row.verdict),
        rank=rank,
        anchor=found,
        base=microseconds(row.base_us) if timed else row.base or NONE,
        now=microseconds(row.run_us) if timed else row.run or NONE,
        ratio=_ratio(row.ratio),
        interval=interval,
        cycles=_ratio(row.cycles),
    )


def _ratio(value: float | None) -> str:
    return NONE if value is None else digits(value, 4)


def tone_of(verdict: Verdict) -> Tone:
    """Bad, undecided, good, or neither."""
    if verdict in WRONG:
        return "bad"
    if verdict in UNDECIDED:
        return "warn"
    return "good" if verdict == "FASTER" else "none"
