"""Running a request: a folder is opened, jobs are run, rows are written as they come."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from megabench.console import Watch
from megabench.isolate import BenchSetup, Job, Pool, Setup, ValidateSetup, jobs_of, remaining
from megabench.isolate.messages import CaseRow
from megabench.isolate.tasks import run_inline
from megabench.results import (
    CaseResult,
    Ceilings,
    Comparison,
    RunEnd,
    RunFolder,
    capture_environment,
    make_header,
    read_run,
)
from megabench.results.store import now
from megabench.resume import reopen, rows_done
from megabench.runs import Request, backend_infos, say, write_html
from megabench.weights import digest

INTERRUPTED = 130


@dataclass
class _Session:
    """A run being written."""

    folder: RunFolder
    watch: Watch
    left: list[Job]
    has_ceilings: bool = False

    def keep(self, row: CaseRow) -> None:
        """Write a row, and show it if it is a case's."""
        if isinstance(row, Ceilings):  # every worker says it; they are measured once
            if self.has_ceilings:
                return
            self.has_ceilings = True
        self.folder.append(row)
        if isinstance(row, CaseResult):
            self.watch(row)
        elif isinstance(row, Comparison):
            self.watch.compared(row)


@contextmanager
def _opened(request: Request) -> Iterator[_Session]:
    """The run's folder with its header written, what is left to do, and its progress; always
    ended, even by Ctrl-C."""
    jobs = jobs_of(request.command, request.cases, request.backends)
    environment = capture_environment(
        request.device,
        backend_infos(request.backends, request.device),
        None if request.weights is None else digest(request.weights),
    )
    planned = len(request.cases) * len(request.backends)
    earlier, left = None, jobs
    if request.resume is not None:
        folder, earlier = reopen(request.resume, request.command, environment)
        left = remaining(jobs, rows_done(earlier, (key for job in jobs for key in job.keys)))
    else:
        folder = RunFolder.create(request.out, request.command)
        header = make_header(
            request.command,
            sys.argv[1:],
            environment,
            suite=request.suite.source,
            seed=request.seed,
            planned=planned,
        )
        folder.append(header)
    started, code = time.perf_counter(), 0
    with folder:
        watch = Watch(planned, request.as_json)
        session = _Session(folder, watch, left)
        if earlier is not None:
            session.has_ceilings = earlier.ceilings is not None
            for row in earlier.cases:
                watch.count(row)
            to_go = sum(len(job.keys) for job in left)
            say(f"rows there: {len(earlier.cases)}, to go: {to_go}")
        try:
            with watch, _terminable():
                yield session
        except KeyboardInterrupt:
            code = INTERRUPTED
            resume = f"megabench {request.command} --resume {folder.path}"
            say(f"interrupted; the rows so far are kept, {resume} makes the rest")
        code = code or int(watch.counts["failed"] + watch.counts["error"] > 0)
        folder.append(
            RunEnd(
                finished=now(),
                seconds=time.perf_counter() - started,
                rows=folder.cases_written,
                exit_code=code,
            )
        )
        for line in watch.summary():
            say(line)


@contextmanager
def _terminable() -> Iterator[None]:
    """Take a polite request to end, as CI systems send it, for a Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def validate_cases(request: Request) -> int:
    """Validate cases against the golden model -> exit code."""
    with _opened(request) as session:
        _run(request, session, [validation_setup(request, device) for device in request.devices])
    code = _exit_code(session.folder.path)
    if code == INTERRUPTED:
        say(str(write_html(session.folder.path)))
    _result(request, str(session.folder.results))
    return code


def validation_setup(request: Request, device: str) -> ValidateSetup:
    """What a worker on `device` needs to know to validate for `request`."""
    cores, workers = len(os.sched_getaffinity(0)), len(request.devices)
    return ValidateSetup(
        device=device,
        source=request.suite.source,
        seed=request.seed,
        weights=_text(request.weights),
        threads=max(1, cores // workers) if workers > 1 else None,
        dump=_text(request.dump),
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def bench_cases(request: Request, check: bool) -> int:
    """Check (unless told not to) and time cases, write the report -> exit code."""
    with _opened(request) as session:
        setup = BenchSetup(
            device=str(request.device),
            source=request.suite.source,
            seed=request.seed,
            weights=_text(request.weights),
            suite=request.suite.name,
            folder=str(session.folder.path),
            check=check,
            cross_check=request.cross_check,
        )
        _run(request, session, [setup])
    _result(request, str(write_html(session.folder.path)))
    return _exit_code(session.folder.path)


def _run(request: Request, session: _Session, setups: Sequence[Setup]) -> None:
    """Run what is left, in workers unless told not to."""
    if request.limit_s is None:
        for row in run_inline(setups[0], session.left):
            session.keep(row)
        return
    with Pool(setups, request.limit_s) as pool:
        for row in pool.run(session.left):
            session.keep(row)


def _exit_code(folder: Path) -> int:
    end = read_run(folder).end
    return end.exit_code if end else 1


def _result(request: Request, path: str) -> None:
    """What the command made: on stdout, unless stdout is for JSON."""
    click.echo(path, err=request.as_json)
