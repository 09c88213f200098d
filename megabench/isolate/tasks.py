"""What a worker does with a job; in one process with the parent when isolation is off."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from megabench.backends import BackendError, get_backend
from megabench.bench.cupti import CuptiTracer, Spans
from megabench.bench.runner import BenchRun, Judge, describe
from megabench.cases import Case
from megabench.devices import make_current
from megabench.evidence.dump import Dumper
from megabench.formats import PAGE_LAYOUTS
from megabench.isolate.messages import BenchSetup, CaseRow, Job, Setup, ValidateSetup
from megabench.results import CaseResult, StageResult
from megabench.results.schema import Cause, Row
from megabench.validate import Skipped, Store, examine, validate_case

Task = Callable[[Job], Sequence[CaseRow]]


@dataclass
class Rows:
    """A run folder's place in a worker: rows are collected, for the parent to write."""

    path: Path
    taken: list[CaseRow] = field(default_factory=list)

    def append(self, row: Row) -> None:
        if isinstance(row, CaseRow):
            self.taken.append(row)

    def take(self) -> list[CaseRow]:
        """The rows since the last call."""
        rows, self.taken = self.taken, []
        return rows


def make_task(setup: Setup) -> tuple[list[CaseRow], Task]:
    """Rows that setting up makes (a bench's ceilings), and what runs one job."""
    make_current(torch.device(setup.device))
    first: list[CaseRow] = []
    if isinstance(setup, ValidateSetup):
        task: Task = _validating(setup)
    else:
        first, task = _benching(setup)

    def run(job: Job) -> list[CaseRow]:
        lost = {name: reason for name in job.backends if (reason := _lost(name))}
        rows: list[CaseRow] = [
            ended_row(setup, job.case, name, reason) for name, reason in lost.items()
        ]
        found = tuple(name for name in job.backends if name not in lost)
        return [*rows, *task(Job(case=job.case, backends=found))] if found else rows

    return first, run


@lru_cache
def _lost(backend: str) -> str | None:
    """Why a backend that the parent has found cannot be found here: an error, lest a run of
    skipped cases pass for a good one."""
    problem = None
    for layout in PAGE_LAYOUTS:
        try:
            get_backend(backend, layout)
            return None
        except BackendError as error:
            problem = problem or str(error)
    return problem


def run_inline(setup: Setup, jobs: Sequence[Job]) -> Iterator[CaseRow]:
    """Run jobs in this process: what ends it ends the run."""
    first, task = make_task(setup)
    yield from first
    for job in jobs:
        yield from task(job)


def _store(setup: Setup) -> Store:
    file = None if setup.weights is None else Path(setup.weights)
    return Store(torch.device(setup.device), layer_seed=setup.seed or 0, weights_file=file)


def _validating(setup: ValidateSetup) -> Task:
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    device = torch.device(setup.device)
    store = _store(setup)
    dumper = None
    if setup.dump is not None:
        dumper = Dumper(Path(setup.dump))
        store.on_rank = dumper.rank

    def run(job: Job) -> list[CaseResult]:
        rows = []
        for name in job.backends:
            if dumper is not None:
                dumper.start(job.case, name)
            row = examine(job.case, name, device, store, setup.source)
            if dumper is not None:
                dumper.finish(row)
            rows.append(row)
        return rows

    return run


def _benching(setup: BenchSetup) -> tuple[list[CaseRow], Task]:
    device = torch.device(setup.device)
    store = _store(setup)
    rows = Rows(Path(setup.folder))
    bench = BenchRun(
        folder=rows,
        device=device,
        suite=setup.suite,
        judge=_judge(store) if setup.check else None,
        repro=lambda case, backend: repro_command(setup, case, backend),
        weights=(lambda workload: store.model(workload.case.model).checkpoint)
        if setup.check
        else None,
        spans=Spans(CuptiTracer()) if setup.cross_check else None,
        layer_seed=store.layer_seed,
        weights_file=store.weights_file,
    )

    def run(job: Job) -> list[CaseRow]:
        try:
            bench.run_case(job.case, job.backends)
        except Exception as error:  # not a backend's: the case cannot be made
            rows.take()
            reason = describe(error)
            return [ended_row(setup, job.case, name, reason) for name in job.backends]
        return rows.take()

    return rows.take(), run


def _judge(store: Store) -> Judge:
    def judge(case: Case, backend: str, device: torch.device) -> list[StageResult]:
        try:
            return validate_case(case, backend, device, store)
        except Skipped as reason:  # it fits to be timed, but not beside the golden model
            message = f"not validated: {reason}"
            return [
                StageResult(name="validate", ok=True, checked=0, verdict=False, message=message)
            ]

    return judge


def repro_command(setup: Setup, case: Case, backend: str) -> str:
    """The command that runs one case on one backend as this run did."""
    words = ["megabench", setup.kind, "--cases", setup.source, "--case", case.id]
    words += ["--backend", backend, "--device", setup.device]
    words += [] if setup.seed is None else ["--seed", str(setup.seed)]
    words += [] if setup.weights is None else ["--weights", setup.weights]
    return shlex.join(words)


def ended_row(
    setup: Setup,
    case: Case,
    backend: str,
    reason: str,
    *,
    cause: Cause | None = None,
    output: str = "",
    seconds: float = 0.0,
) -> CaseResult:
    """The row of a case that came to no result."""
    return CaseResult(
        suite=case.suite,
        case_id=case.id,
        case_hash=case.hash,
        case=case.model_dump(mode="json"),
        backend=backend,
        status="error",
        reason=reason,
        cause=cause,
        output=output,
        tokens=case.num_tokens,
        seconds=seconds,
        repro=repro_command(setup, case, backend),
    )
