"""The run's table as CSV and Markdown, for spreadsheets and pull requests."""

from __future__ import annotations

from pathlib import Path

from megabench.report.frames import cases_frame, measurements_frame
from megabench.report.summary import Summary, summarise
from megabench.report.verdict import GateView
from megabench.report.words import microseconds, percent, ratio
from megabench.results import Run

MARKDOWN_ROWS = 200
"""Rows of the Markdown table; the CSV has all."""


def write_csv(run: Run, path: Path) -> None:
    """Every measurement a line; for runs that measured nothing, every case a line."""
    frame = measurements_frame(run)
    if frame.empty:
        frame = cases_frame(run).drop(columns="anchor")
    frame.to_csv(path, index=False)


def write_markdown(run: Run, path: Path, gate: GateView | None = None) -> None:
    """Verdict, counts, what is wrong, the gate's findings, and the table of cases."""
    lines = _head(run, summarise(run))
    if gate is not None:
        lines += _gate(gate)
    lines += _table(run)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _head(run: Run, summary: Summary) -> list[str]:
    header = run.header
    lines = [f"# megabench {header.command if header else 'run'}: {summary.headline}", ""]
    if header:
        where = header.environment
        lines.append(
            f"- {where.device_name}, {header.started}, megabench {header.megabench_version}"
        )
    counts = ", ".join(f"{count} {status}" for status, count in summary.counts.items() if count)
    lines.append(f"- {counts or 'no case rows'}")
    lines += [f"- skipped {count} x: {reason}" for reason, count in summary.reasons]
    if summary.worst_ratio:
        worst = summary.worst_ratio
        lines.append(
            f"- worst error / bound: {ratio(worst.value)} ({worst.label}, {worst.case.case_id})"
        )
    for name, extreme in (("best", summary.best_fraction), ("worst", summary.worst_fraction)):
        if extreme:
            lines.append(
                f"- {name} roofline fraction of a step: {percent(extreme.value)} "
                f"({extreme.case.case_id} on {extreme.case.backend})"
            )
    lines += [f"- **{case}**: {reason}" for _, case, reason in summary.problems]
    return [*lines, ""]


def _gate(gate: GateView) -> list[str]:
    """The gate's counts and every finding but SAME."""
    counts = ", ".join(f"{c.count} {c.verdict}" for c in gate.counts)
    lines = [f"## Gate: {gate.outcome} (exit {gate.header.exit_code})", ""]
    lines += [f"- {counts or 'nothing to compare'}"]
    lines += [f"- environment: {d.field} {d.base} -> {d.run}" for d in gate.header.environment]
    told = [line for line in gate.lines if line.row.verdict != "SAME"]
    if told:
        lines += [
            "",
            "| verdict | case | backend | op | column | baseline | now | ratio | why |",
            "| --- | --- | --- | --- | --- | ---: | ---: | ---: | --- |",
        ]
    for line in told[:MARKDOWN_ROWS]:
        row = line.row
        verdict = row.verdict if row.gated else f"({row.verdict})"
        name = (verdict, row.case_id, row.backend, row.op, row.column)
        why = f"{row.code}: {row.message}"
        lines.append(_row(*name, line.base, line.now, line.ratio, why))
    if len(told) > MARKDOWN_ROWS:
        lines += ["", f"{len(told) - MARKDOWN_ROWS} more findings in gate.jsonl."]
    return [*lines, ""]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(run: Run) -> list[str]:
    frame = cases_frame(run)
    if frame.empty:
        return []
    lines = [
        "| case | backend | status | s_q | step | roofline | error / bound | reason |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in frame.head(MARKDOWN_ROWS).itertuples():
        cells = [
            str(row.case_id),
            str(row.backend),
            str(row.status),
            str(row.tokens),
            microseconds(_number(row.step_us)),
            percent(_number(row.fraction)),
            ratio(_number(row.worst)),
            str(row.reason),
        ]
        lines.append(_row(*cells))
    if len(frame) > MARKDOWN_ROWS:
        lines += ["", f"{len(frame) - MARKDOWN_ROWS} more rows in results.csv."]
    return lines


def _number(value: object) -> float | None:
    """A cell as a float; pandas writes what is missing as NaN."""
    if value is None:
        return None
    number = float(str(value))
    return None if number != number else number
