"""Verdicts kept beside the rows they judge: `gate.jsonl`, for the report and for scripts.

The first line says what was compared with what, then comes one line a finding, worst first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from megabench.gate.findings import Finding, GateResult
from megabench.gate.lines import Line, read_lines, text_of, write_whole
from megabench.gate.processes import GateError
from megabench.gate.verdicts import ORDER, Verdict
from megabench.results.store import now

VERDICTS = "gate.jsonl"
VERDICTS_VERSION = 1


class Source(Line):
    """The baseline that was compared with."""

    path: str
    """As it was named."""
    device_name: str
    recorded: str
    git_commit: str | None
    processes: int


class Difference(Line):
    """A field on which the two environments differ."""

    field: str
    base: str
    run: str


class VerdictsHeader(Line):
    """First line: what was judged, by what, and what came out."""

    kind: Literal["gate"] = "gate"
    gate_version: int = VERDICTS_VERSION
    judged: str
    """UTC."""
    baseline: Source
    processes: int
    rerun: int
    """Processes of the re-run; 0 where there was none."""
    rows: int
    """Case rows judged, so that a run that has grown since can be told."""
    exit_code: int
    environment: list[Difference]
    notes: list[str]


class FindingRow(Line):
    """A finding, flat: see `megabench.gate.findings.Finding`."""

    kind: Literal["finding"] = "finding"
    verdict: Verdict
    code: str
    case_id: str
    backend: str
    op: str
    column: str
    gated: bool
    message: str
    base: str
    run: str
    base_us: float | None
    run_us: float | None
    ratio: float | None
    """run / baseline, of times or of ratios to a reference backend."""
    ratio_low: float | None
    ratio_high: float | None
    """90 % interval of `ratio`; None with too few processes."""
    cycles: float | None
    """run / baseline in SM cycles; None where a clock is not known."""
    evidence: list[str]


_HEADER: TypeAdapter[VerdictsHeader] = TypeAdapter(VerdictsHeader)
_FINDING: TypeAdapter[FindingRow] = TypeAdapter(FindingRow)


@dataclass(frozen=True)
class Verdicts:
    """A judgement read back."""

    header: VerdictsHeader
    findings: list[FindingRow]

    def counts(self) -> dict[Verdict, int]:
        """Findings by verdict, worst first."""
        seen = Counter(f.verdict for f in self.findings)
        return {verdict: seen[verdict] for verdict in ORDER if seen[verdict]}


def verdicts_of(result: GateResult, named: Path) -> Verdicts:
    """A result as it is kept; `named` is where the baseline was said to be."""
    recorded = result.baseline
    header = VerdictsHeader(
        judged=now(),
        baseline=Source(
            path=str(named),
            device_name=recorded.environment.device_name,
            recorded=recorded.recorded,
            git_commit=recorded.git_commit,
            processes=recorded.processes,
        ),
        processes=result.processes,
        rerun=result.rerun,
        rows=result.rows,
        exit_code=result.exit_code,
        environment=[Difference(field=m.field, base=m.base, run=m.run) for m in result.environment],
        notes=result.notes,
    )
    return Verdicts(header, [_row(finding) for finding in result.findings])


def write_verdicts(verdicts: Verdicts, folder: Path) -> None:
    """Put them into the run's folder, in place of earlier ones. OSError when they cannot be."""
    write_whole(folder / VERDICTS, text_of([verdicts.header, *verdicts.findings]))


def read_verdicts(folder: Path) -> Verdicts | None:
    """The verdicts kept in a run's folder, or None. GateError when the file is none of ours."""
    path = folder / VERDICTS
    if not path.is_file():
        return None
    try:
        return Verdicts(*read_lines(path, _HEADER, _FINDING))
    except GateError as error:
        raise GateError(f"{error} (megabench gate RUN writes it anew)") from error


def _row(finding: Finding) -> FindingRow:
    change = finding.change
    low, high = change.ratio_interval if change else (None, None)
    ratio = change.ratio if change else None
    if ratio is None and finding.base_us and finding.run_us:
        ratio = finding.run_us / finding.base_us
    return FindingRow(
        verdict=finding.decision.verdict,
        code=finding.decision.code,
        case_id=finding.case_id,
        backend=finding.backend,
        op=finding.op,
        column=finding.column,
        gated=finding.gated,
        message=finding.decision.message,
        base=finding.base,
        run=finding.run,
        base_us=finding.base_us,
        run_us=finding.run_us,
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        cycles=1 + change.cycles if change and change.cycles is not None else None,
        evidence=list(finding.evidence),
    )
