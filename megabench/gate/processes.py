"""A run of several processes: the run folders they left, side by side in one folder.

    reports/20261130T141500Z-bench-x5/
      20261130T141500Z-bench/results.jsonl      one folder a process
      20261130T141621Z-bench/results.jsonl
      rerun/20261130T142500Z-bench/…            what looked slower, once more

A plain run folder is a run of one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megabench.gate.environment import mismatches
from megabench.results import Run, RunHeader, read_run
from megabench.results.store import RESULTS

RERUN = "rerun"
INTERRUPTED = 130


class GateError(ValueError):
    """Something the gate cannot work with; the message is one line for a person."""


def read_processes(path: Path) -> list[Run]:
    """The processes of a run, in the order they ran.

    GateError when there is none, or when they are not of one run. One that was cut short counts
    with the rows it has: see `cut_short`.
    """
    if path.is_file() or (path / RESULTS).is_file():
        runs = [read_run(path)]
    else:
        runs = [read_run(file.parent) for file in sorted(path.glob(f"*/{RESULTS}"))]
    if not runs:
        raise GateError(f"{path}: holds no run")
    for run in runs:
        _check_once(run)
        _check_together(runs[0], run)
    return runs


def read_rerun(path: Path) -> list[Run]:
    """The processes of a run's re-run, none when there was none."""
    folder = path / RERUN
    return read_processes(folder) if any(folder.glob(f"*/{RESULTS}")) else []


def cut_short(runs: list[Run]) -> list[Run]:
    """The processes that crashed or were interrupted before their last case, or whose file has
    fewer cases than they planned, or had written, or a torn line."""
    return [r for r in runs if r.torn or _unended(r) or len(r.cases) < _promised(r)]


def _unended(run: Run) -> bool:
    return run.end is None or run.end.exit_code == INTERRUPTED


def _promised(run: Run) -> int:
    """Case rows that a process says it has."""
    planned = run.header.planned if run.header else None
    return max(planned or 0, run.end.rows if run.end else 0)


def rows_of(runs: list[Run], rerun: list[Run]) -> int:
    """Case rows of a run's processes and its re-run's."""
    return sum(len(run.cases) for run in [*runs, *rerun])


def suite_of(runs: list[Run]) -> str:
    """The name of the suite whose cases a run has; GateError for none or several."""
    suites = sorted({case.suite for run in runs for case in run.cases})
    if len(suites) != 1:
        found = " and ".join(suites) or "no case"
        raise GateError(f"{runs[0].path}: holds {found}; the gate compares one suite")
    return suites[0]


def header_of(runs: list[Run]) -> RunHeader:
    """The header of a run's first process; GateError where there is none."""
    header = runs[0].header
    if header is None:
        raise GateError(f"{runs[0].path}: has no header row")
    return header


def _check_once(run: Run) -> None:
    """A process tells of everything once: told twice, it would count as two."""
    told = [(f"{c.case_id} on {c.backend}",) for c in run.cases] + [
        (f"{c.case_id} on {c.backend}", c.baseline, c.op, c.column) for c in run.comparisons
    ]
    for what, count in Counter(told).items():
        if count > 1:
            raise GateError(f"{run.path}: tells of {' '.join(what)} {count} times")


def check_rerun(runs: list[Run], rerun: list[Run]) -> None:
    """GateError unless a re-run is of the same code on the same machine as its run. It has fewer
    cases, so its arguments are others."""
    for run in rerun:
        _check_together(runs[0], run, ("command", "git_commit", "seed"))


def _check_together(
    first: Run, other: Run, fields: Sequence[str] = ("command", "argv", "git_commit", "seed")
) -> None:
    """Processes of one run differ in nothing but chance."""
    ours, theirs = header_of([first]), header_of([other])
    found = [
        f"{name} {getattr(theirs, name)}, not {getattr(ours, name)}"
        for name in fields
        if getattr(ours, name) != getattr(theirs, name)
    ]
    found += [str(m) for m in mismatches(ours.environment, theirs.environment, [])]
    if found:
        raise GateError(f"{other.path}: not a process of the run of {first.path}: {found[0]}")
