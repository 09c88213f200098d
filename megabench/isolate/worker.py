"""A worker process: takes jobs from a pipe, sends rows up another, ends with its parent.

Its stdout and stderr belong to the backends under test; nothing of megabench's goes there but
the traceback of a crash.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import BaseModel

from megabench.isolate.messages import SETUP, CaseRow, Done, Job, Ready
from megabench.isolate.tasks import Task, make_task
from megabench.reasons import reason_of
from megabench.results import CaseResult
from megabench.results.schema import Cause

_PR_SET_PDEATHSIG = 1
_FIRST_TO_KILL = "500"
"""Out-of-memory score: the kernel takes a worker before its parent."""
_MEMORY = re.compile(r"MemoryError|out of memory|can't allocate memory", re.I)
"""How Python, torch's allocators and the CUDA driver say it."""


def main() -> None:
    """Serve jobs until the pipe closes or a job leaves the process unfit for another."""
    jobs_fd, rows_fd, parent = (int(word) for word in sys.argv[2:5])
    _end_with(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    for fd in (jobs_fd, rows_fd):
        os.set_inheritable(fd, False)
    with os.fdopen(jobs_fd, "rb") as jobs, os.fdopen(rows_fd, "wb") as rows:

        def send(message: BaseModel) -> None:
            rows.write(message.model_dump_json().encode() + b"\n")
            rows.flush()

        setup = SETUP.validate_json(jobs.readline())
        first, task = make_task(setup)
        for row in first:
            send(row)
        send(Ready())
        home = Path.cwd()
        for line in jobs:
            os.chdir(home)  # a backend may have gone elsewhere; paths of cases are relative
            done = attempt(task, Job.model_validate_json(line), torch.device(setup.device), send)
            send(done)
            if done.cause is not None:
                return


def attempt(task: Task, job: Job, device: torch.device, send: Callable[[BaseModel], None]) -> Done:
    """Run one job and send its rows, unless it leaves the process unfit for another."""
    try:
        rows = task(job)
        trouble = _trouble(rows, device)
    except BaseException as stop:  # sys.exit or KeyboardInterrupt of a backend
        return Done(cause="exit", reason=f"the backend raised {reason_of(stop)}")
    if trouble is not None:
        return trouble
    for row in rows:
        send(row)
    return Done()


def _trouble(rows: Sequence[CaseRow], device: torch.device) -> Done | None:
    """Memory that ran out, or a device that takes no more work: what follows would fail, too."""
    errors = [row.reason for row in rows if isinstance(row, CaseResult) and row.status == "error"]
    cause: Cause | None = None
    reason = errors[0] if errors else ""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as error:
            cause, reason = "device", reason or str(error).splitlines()[0]
    short = [text for text in errors if _MEMORY.search(text)]
    if cause is None and short:
        cause, reason = "out_of_memory", short[0]
    return Done(cause=cause, reason=reason) if cause else None


def _end_with(parent: int) -> None:
    """Die when the parent does, however it does, and before it when memory runs out."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_KILL, encoding="ascii")
