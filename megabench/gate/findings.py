"""What the gate found: one finding for everything a run or its baseline has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megabench.gate.baseline import BaselineHeader
from megabench.gate.environment import Mismatch
from megabench.gate.observe import Key
from megabench.gate.pool import Change
from megabench.gate.verdicts import EXIT_UNDECIDED, ORDER, RUN_AGAIN, Decision, exit_code


@dataclass(frozen=True)
class Finding:
    """What the gate says of one op and column of a case on a backend, and on what grounds."""

    case_id: str
    backend: str
    op: str
    """An op's name, or "all" for what concerns the whole case."""
    column: str
    """A timing column, "correctness", "kernels", or "all"."""
    decision: Decision
    gated: bool = True
    """Whether it counts for the exit code."""
    base: str = ""
    run: str = ""
    """The two sides in short, for a table."""
    evidence: tuple[str, ...] = ()
    base_us: float | None = None
    run_us: float | None = None
    """The two medians, for a time."""
    change: Change | None = None
    """What the verdict on a time rests on; None with too few processes."""


def nothing_compared(findings: Sequence[Finding]) -> bool:
    """Whether no finding sets the run against the baseline: none at all, or nothing but NEW."""
    return all(f.decision.verdict == "NEW" for f in findings)


@dataclass(frozen=True)
class GateResult:
    """Every finding of a run, worst first, and what was compared with what."""

    findings: list[Finding]
    environment: list[Mismatch]
    notes: list[str]
    baseline: BaselineHeader
    processes: int
    rerun: int
    """Processes of the re-run; 0 where there was none."""
    rows: int
    """Case rows judged, the re-run's too."""

    @property
    def exit_code(self) -> int:
        """0 good, 1 slower or broken, 3 cannot decide."""
        if nothing_compared(self.findings):
            return EXIT_UNDECIDED
        return exit_code(f.decision.verdict for f in self.findings if f.gated)

    def counts(self) -> dict[str, int]:
        """Findings by verdict, worst first."""
        seen = Counter(f.decision.verdict for f in self.findings)
        return {verdict: seen[verdict] for verdict in ORDER if seen[verdict]}

    def run_again(self) -> list[Key]:
        """(case id, backend) of the times that more processes may settle, slower ones first."""
        slow = (
            (f.case_id, f.backend)
            for f in self.findings
            if f.gated and f.decision.code in RUN_AGAIN
        )
        return list(dict.fromkeys(slow))
