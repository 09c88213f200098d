"""Reports: a run's rows made into one self-contained HTML file, a CSV, and a Markdown summary."""

from __future__ import annotations

from pathlib import Path

from megabench.gate.kept import read_verdicts
from megabench.gate.processes import read_processes, read_rerun, rows_of
from megabench.report.export import write_csv, write_markdown
from megabench.report.html import render
from megabench.report.pooled import pooled
from megabench.report.verdict import GateView, gate_view
from megabench.results import Run, read_run
from megabench.results.store import RESULTS

REPORT, TABLE, SUMMARY = "report.html", "results.csv", "summary.md"


def build(path: str | Path) -> Path:
    """Read a run, of one process or of several, and its verdicts if it was gated, and write its
    report, table and summary into its folder -> the report's path.

    `path` is the folder or a `results.jsonl`. Works on any run, one cut short or without a case
    row too. StoreError or GateError when there is no run, or its files are damaged.
    """
    where = Path(path)
    folder = where.parent if where.is_file() else where
    alone = (folder / RESULTS).is_file()
    runs = [read_run(folder)] if alone else read_processes(folder)
    run, verdicts = pooled(runs), read_verdicts(folder)
    rows = rows_of(runs, read_rerun(folder))
    gate = gate_view(verdicts, run, rows) if verdicts else None
    return write_report(run, folder / REPORT, gate, len(runs))


def write_report(run: Run, path: Path, gate: GateView | None = None, processes: int = 1) -> Path:
    """Write the HTML report of `run` to `path`, CSV and Markdown beside it -> `path`."""
    path.write_text(render(run, gate, processes), encoding="utf-8")
    write_csv(run, path.with_name(TABLE))
    write_markdown(run, path.with_name(SUMMARY), gate)
    return path


__all__ = ["REPORT", "SUMMARY", "TABLE", "build", "write_report"]
