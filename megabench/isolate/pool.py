"""Jobs spread over workers, one a device: whatever happens to a worker, a row comes out."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from megabench.isolate.messages import CaseRow, Done, Job, Ready, Setup
from megabench.isolate.process import Ending, Worker
from megabench.isolate.tasks import ended_row
from megabench.results import CaseResult

OUTPUT_LIMIT = 16 << 20
"""Bytes a case may write to stdout and stderr together."""
START_LIMIT_S = 300.0
"""For a worker to import torch and, for a bench, to measure the device's ceilings."""
_START_ATTEMPTS = 2
_TICK_S = 0.2


class WorkerError(RuntimeError):
    """Workers that do not even start; one line for a person."""


class JobQueue:
    """Jobs by group, in order. Several workers keep to different groups while there are enough."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._groups: dict[tuple[object, ...], deque[Job]] = {}
        for job in jobs:
            self._groups.setdefault(job.group, deque()).append(job)

    def take(self, own: tuple[object, ...] | None, others: set[tuple[object, ...]]) -> Job | None:
        """The next job for a worker that last served `own` while `others` are being served."""
        if not self._groups:
            return None
        free = [group for group in self._groups if group not in others]
        if own in self._groups:
            group = own
        elif free:
            group = free[0]
        else:
            group = max(self._groups, key=lambda name: len(self._groups[name]))
        job = self._groups[group].popleft()
        if not self._groups[group]:
            del self._groups[group]
        return job

    def put_first(self, jobs: Iterable[Job]) -> None:
        """Jobs to be run before all others."""
        again = JobQueue(jobs)._groups
        for group, waiting in self._groups.items():
            again.setdefault(group, deque()).extend(waiting)
        self._groups = again


@dataclass
class _Seat:
    """One place to work at: a device, its present worker, the job in hand."""

    setup: Setup
    limit_s: float
    """For one case on one backend."""
    output_limit: int
    worker: Worker | None = None
    ready: bool = False
    since: float = 0.0
    """When the job (or the worker, before it is ready) was started."""
    failed_starts: int = 0
    job: Job | None = None
    group: tuple[object, ...] | None = None
    rows: list[CaseRow] = field(default_factory=list)

    def give(self, job: Job) -> None:
        """Start on a job, in a new worker if there is none."""
        if self.worker is None:
            self.worker, self.ready = Worker(self.setup), False
        self.job, self.group, self.rows = job, job.group, []
        self.since = time.monotonic()
        self.worker.send(job)

    def poll(self) -> Ending | Done | None:
        """Take in what the worker says; the job's end if it has come."""
        assert self.worker is not None
        quiet = self.worker.read_output(self.output_limit)
        gone = self.worker.exited()  # before reading, so that nothing said is missed
        try:
            for message in self.worker.messages():
                match message:
                    case Ready():
                        self.ready, self.since, self.failed_starts = True, time.monotonic(), 0
                    case Done():
                        return self._complete(message)
                    case _:
                        self.rows.append(message)
        except ValidationError:
            return Ending("output", "what came for the rows is no row", self.worker.tail)
        if gone:
            return self.worker.ending()
        if not quiet:
            size = f"{self.output_limit / 2**20:g} MiB"
            reason = f"more than {size} written to stdout and stderr"
            return Ending("output", reason, self.worker.tail)
        limit = self._limit()
        return self.worker.hung(limit) if self.seconds > limit else None

    def _complete(self, done: Done) -> Ending | Done:
        """A job's end, unless rows are missing or another job's: a backend wrote among them."""
        assert self.job is not None
        assert self.worker is not None
        cases = [row for row in self.rows if isinstance(row, CaseResult)]
        keys = [(row.case_id, row.case_hash, row.backend) for row in cases]
        if done.cause is not None or sorted(keys) == sorted(self.job.keys):
            return done
        self.rows = []
        return Ending("output", "the rows that came are not the case's", self.worker.tail)

    @property
    def seconds(self) -> float:
        """How long the job has run."""
        return time.monotonic() - self.since

    def _limit(self) -> float:
        assert self.job is not None
        return self.limit_s * len(self.job.backends) if self.ready else START_LIMIT_S

    def retire(self) -> None:
        """End the worker; the next job gets a new one."""
        if self.worker is not None:
            self.worker.kill()
        self.worker, self.ready, self.group = None, False, None


class Pool:
    """Workers for the jobs of a run, one a setup; they live until the pool is left.

    A case that crashes, hangs, floods or poisons its worker becomes an `error` row with its
    `cause`, and the next case gets a new worker. When several backends were in one job, each is
    run again alone, to find the one at fault.
    """

    def __init__(
        self, setups: Sequence[Setup], limit_s: float, output_limit: int = OUTPUT_LIMIT
    ) -> None:
        self._seats = [_Seat(setup, limit_s, output_limit) for setup in setups]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *failure: object) -> None:
        for seat in self._seats:
            seat.retire()

    def run(self, jobs: Iterable[Job]) -> Iterator[CaseRow]:
        """Run jobs, giving rows as they are made. WorkerError when workers do not start."""
        queue = JobQueue(jobs)
        while busy := self._occupy(queue):
            pipes = [fd for seat in busy if (w := seat.worker) for fd in (w.rows, w.output)]
            select.select(pipes, [], [], _TICK_S)
            for seat in busy:
                end = seat.poll()
                if end is not None:
                    yield from self._finish(seat, end, queue)

    def _occupy(self, queue: JobQueue) -> list[_Seat]:
        """Give idle seats work -> the seats that have some."""
        for seat in self._seats:
            if seat.job is None:
                others = {s.group for s in self._seats if s is not seat and s.job and s.group}
                job = queue.take(seat.group, others)
                if job is not None:
                    seat.give(job)
        return [seat for seat in self._seats if seat.job is not None]

    def _finish(self, seat: _Seat, end: Ending | Done, queue: JobQueue) -> Iterator[CaseRow]:
        job, seconds, started = seat.job, seat.seconds, seat.ready
        assert job is not None
        if isinstance(end, Done):
            tail = seat.worker.tail if seat.worker else ""
            end_of = Ending(end.cause, end.reason, tail) if end.cause else None
        else:
            end_of = end
        seat.job = None
        if end_of is not None:
            seat.retire()
        if not started and end_of is not None:
            self._failed_start(seat, end_of)
            queue.put_first([job])
            return
        yield from seat.rows
        if end_of is None:
            return
        made = {row.backend for row in seat.rows if isinstance(row, CaseResult)}
        missing = Job(case=job.case, backends=tuple(n for n in job.backends if n not in made))
        if len(missing.backends) > 1:
            queue.put_first(missing.alone())
        elif missing.backends:
            yield ended_row(
                seat.setup,
                job.case,
                missing.backends[0],
                end_of.reason,
                cause=end_of.cause,
                output=end_of.output,
                seconds=seconds,
            )

    def _failed_start(self, seat: _Seat, end: Ending) -> None:
        seat.failed_starts += 1
        if seat.failed_starts >= _START_ATTEMPTS:
            last = end.output.splitlines()[-1:] or [""]
            raise WorkerError(
                f"a worker on {seat.setup.device} cannot start: {end.reason} {last[0]}"
            )
