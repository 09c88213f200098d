"""The gate's result for a person: a table of what is not the same, counts, and the evidence."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megabench.gate.findings import Finding, GateResult
from megabench.gate.verdicts import Verdict

_STYLE: dict[Verdict, str] = {
    "BROKEN": "bold red",
    "SLOWER": "red",
    "INVALID": "magenta",
    "MISSING": "yellow",
    "AMBIGUOUS": "yellow",
    "NEW": "cyan",
    "FASTER": "green",
    "SAME": "dim",
}
_EXIT = {0: "good", 1: "slower or broken", 3: "cannot decide"}
WIDE = 200
"""Columns when stdout is no terminal: a log keeps whole lines."""
ROOMY = 130
"""Columns from which both times have columns of their own; `why` tells of them as well."""


def show(
    result: GateResult, *, explain: bool = False, err: bool = False, report: Path | None = None
) -> None:
    """Print a result, to stderr with `err`. `explain` adds every finding's evidence; `report` is
    where it can be read, too."""
    out = Console(stderr=err, emoji=False)
    if not out.is_terminal:
        out = Console(stderr=err, width=WIDE, emoji=False)
    listed = [f for f in result.findings if f.decision.verdict != "SAME"]
    if listed:
        out.print(_table(listed, times=out.width >= ROOMY))
    if explain:
        for finding in result.findings:
            _explain(out, finding)
    for note in result.notes:
        out.print(f"note: {note}", markup=False, highlight=False)
    if report is not None:
        out.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in result.counts().items())
    code = result.exit_code
    summary = f"{counts or 'nothing to compare'}: {_EXIT[code]} (exit {code})"
    out.print(summary, markup=False, highlight=False)


def _table(findings: list[Finding], *, times: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("verdict", no_wrap=True)
    for name in ("case", "backend", "op", "column"):
        table.add_column(name, overflow="fold")
    for name in ("baseline", "now") if times else ():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("code", no_wrap=True)
    table.add_column("why", overflow="fold")
    for f in findings:
        style = _STYLE[f.decision.verdict]
        verdict = f.decision.verdict if f.gated else f"({f.decision.verdict})"
        where = ("every case" if f.case_id == "*" else f.case_id, f.backend, f.op, f.column)
        cells = (*where, f.base, f.run) if times else where
        why = (f.decision.code, f.decision.message)
        table.add_row(f"[{style}]{verdict}[/]", *(escape(text) for text in (*cells, *why)))
    return table


def _explain(out: Console, finding: Finding) -> None:
    decision = finding.decision
    head = f"{decision.verdict}  {finding.case_id}  {finding.backend}  {finding.op}  "
    lines = [
        f"\n{head}{finding.column}",
        f"  {decision.code}: {decision.message}",
        *(f"  {line}" for line in finding.evidence),
    ]
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
