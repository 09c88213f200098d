"""A bench run in several fresh processes, and once more where it looks slower.

`bench --processes N` and `bench --gate FILE` come here. Each process is a `megabench bench` of its
own with a run folder of its own, one after the other, in a folder that `megabench gate` reads as
one run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from megabench.gate.baseline import Baseline
from megabench.gate.compare import compare
from megabench.gate.findings import GateResult
from megabench.gate.observe import Key, observe
from megabench.gate.policy import Policy
from megabench.gate.processes import RERUN, GateError, read_processes, read_rerun
from megabench.results import Run
from megabench.runs import say

Launch = Callable[[Sequence[str]], int]
"""Runs `megabench` with these arguments in a fresh process -> its exit code."""
NAMED = 3
"""Cases that are named when several are run again."""
UNUSABLE = (2, 130)
"""Exit codes after which further processes make no sense: usage, interrupted."""


@dataclass(frozen=True)
class Processes:
    """A bench to be run in fresh processes."""

    folder: Path
    """Where their run folders go; made by the first."""
    arguments: Sequence[str]
    """Of `megabench bench`, without `--cases`, `--case` and `--out`."""
    cases: Sequence[str]
    """`--cases FILE`, and a `--case GLOB` for each glob."""
    count: int
    launch: Launch

    def run(self) -> int:
        """Run them all, stopping at one that could not run -> the worst exit code."""
        return self._run(self.folder, self.cases, ())

    def run_again(self, runs: list[Run], keys: list[Key]) -> int:
        """Run the cases of `keys` once more, in as many processes, without validating them."""
        folder = self.folder / RERUN
        file = write_cases(runs, keys, folder)
        return self._run(folder, ("--cases", str(file)), ("--no-validate",))

    def _run(self, folder: Path, cases: Sequence[str], extra: Sequence[str]) -> int:
        worst = 0
        extra = [word for word in extra if word not in self.arguments]
        for number in range(1, self.count + 1):
            say(f"process {number} of {self.count}")
            words = ["bench", *cases, *self.arguments, *extra, "--out", str(folder)]
            code = self.launch(words)
            if code < 0 or code in UNUSABLE:
                return code if code > 0 else 1
            worst = max(worst, code)
        return worst


def gate_processes(processes: Processes, baseline: Baseline, policy: Policy) -> GateResult:
    """The hook between a bench and its gate: judge the run, run again what looks slower, judge.

    The processes must have run. What looks slower is run once; the second judgement stands.
    """
    runs = read_processes(processes.folder)
    result = compare(baseline, runs, policy, read_rerun(processes.folder))
    keys = result.run_again()
    if not keys:
        return result
    names = ", ".join(f"{case_id} on {backend}" for case_id, backend in keys[:NAMED])
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    say(f"slower, or too noisy to tell: once more in {processes.count} processes: {names}{more}")
    if processes.run_again(runs, keys) in UNUSABLE:
        raise GateError(f"{processes.folder / RERUN}: the re-run did not end")
    return compare(baseline, runs, policy, read_rerun(processes.folder))


def write_cases(runs: list[Run], keys: list[Key], folder: Path) -> Path:
    """A case file of some of a run's cases, under the suite's name so that they stay the same.

    -> `<folder>/<suite>.yaml`. GateError when the cases are of several models.
    """
    seen = observe(runs)
    rows = {case_id: seen[case_id, backend].rows[0] for case_id, backend in keys}
    models = {str(row.case["model"]) for row in rows.values()}
    if len(models) != 1:
        raise GateError(f"cases of several models cannot be run again: {', '.join(models)}")
    axes = [
        {name: value for name, value in row.case.items() if name not in ("suite", "model")}
        for row in rows.values()
    ]
    model = models.pop()
    if model.endswith(".json"):
        model = str(Path(model).resolve())
    suite = next(iter(rows.values())).suite
    path = folder / f"{suite}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    document = {"description": "what looked slower", "model": model, "include": axes}
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def new_folder(out: Path, count: int) -> Path:
    """A name for a run of `count` processes under `out` that nothing has yet; not made."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    base = out / f"{stamp}-bench-x{count}"
    path, n = base, 1
    while path.exists():
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return path


def fresh_process(as_json: bool) -> Launch:
    """Launches this interpreter's `megabench`; its rows go to our stdout only with `as_json`."""

    def launch(arguments: Sequence[str]) -> int:
        command = [sys.executable, "-m", "megabench", *arguments]
        process = subprocess.Popen(command, stdout=None if as_json else subprocess.DEVNULL)
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()  # it got the signal, too, and ends its run folder
            return 130

    return launch
