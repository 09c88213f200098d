"""Reports: a run's rows made into one self-contained HTML file, a CSV, and a Markdown summary."""

from __future__ import annotations

from pathlib import Path

from megabench.report.export import write_csv, write_markdown
from megabench.report.html import render
from megabench.results import Run, read_run

REPORT, TABLE, SUMMARY = "report.html", "results.csv", "summary.md"


def build(run_folder: str | Path) -> Path:
    """Read a run folder and write its report, table and summary there -> the report's path.

    Works on any run, one cut short or without a case row too. StoreError when there is no run.
    """
    run = read_run(run_folder)
    return write_report(run, run.path / REPORT)


def write_report(run: Run, path: Path) -> Path:
    """Write the HTML report of `run` to `path`, CSV and Markdown beside it -> `path`."""
    path.write_text(render(run), encoding="utf-8")
    write_csv(run, path.with_name(TABLE))
    write_markdown(run, path.with_name(SUMMARY))
    return path


__all__ = ["REPORT", "SUMMARY", "TABLE", "build", "write_report"]
