"""Isolation: cases run in worker processes, so that no backend can end a run.

    parent ── jobs ──►  worker (one a device)       a fresh interpreter, a session of its own
           ◄── rows ──  validate or bench, case by case
           ◄── output ─ what backends print, bounded

The parent writes every row. A worker that crashes, hangs, floods its output or is left with a
broken device is replaced, and its case gets a row that says so.
"""

from megabench.isolate.messages import (
    BenchSetup,
    Job,
    Key,
    Setup,
    ValidateSetup,
    jobs_of,
    remaining,
)
from megabench.isolate.pool import Pool, WorkerError

__all__ = [
    "BenchSetup",
    "Job",
    "Key",
    "Pool",
    "Setup",
    "ValidateSetup",
    "WorkerError",
    "jobs_of",
    "remaining",
]
