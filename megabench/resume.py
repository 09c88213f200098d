"""Continuing a run that was cut short: the same folder, the rows that are missing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megabench.gate.environment import mismatches
from megabench.isolate.messages import Key
from megabench.results import Environment, Run, RunFolder, RunHeader, StoreError, read_run
from megabench.results.environment import git_commit

_OTHER_BACKENDS = ("backends.*",)


def read_header(path: Path) -> RunHeader:
    """How a run was started. StoreError when there is no run, or not even its first row."""
    header = read_run(path).header
    if header is None:
        raise StoreError(f"--resume {path}: the run has no header; start a new one")
    return header


def reopen(path: Path, command: str, environment: Environment) -> tuple[RunFolder, Run]:
    """A run's folder, to be continued, and its rows.

    StoreError when it was another command's, or made by other code, libraries or hardware: the
    header speaks for every row.
    """
    header = read_header(path)
    wanted = [("command", header.command, command), ("commit", header.git_commit, git_commit())]
    found = [f"{name} {old} -> {new}" for name, old, new in wanted if old != new]
    found += [str(m) for m in mismatches(header.environment, environment, _OTHER_BACKENDS)]
    if found:
        raise StoreError(f"--resume {path}: this is not what made the run: {', '.join(found)}")
    return RunFolder.reopen(path)


def rows_done(run: Run, wanted: Iterable[Key]) -> set[Key]:
    """Which rows a run has already, by case id, hash and backend.

    StoreError when a wanted case has the name of one there and another content.
    """
    done = {(row.case_id, row.case_hash, row.backend) for row in run.cases}
    hashes = {row.case_id: row.case_hash for row in run.cases}
    for case_id, case_hash, _ in wanted:
        if hashes.get(case_id, case_hash) != case_hash:
            raise StoreError(f"--resume {run.path}: case {case_id} is not what it was")
    return done
