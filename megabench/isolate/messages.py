"""What the parent and a worker say to each other: one JSON object a line, down and up a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from megabench.cases import Case
from megabench.results import CaseResult, Ceilings, Comparison
from megabench.results.schema import Cause

Key = tuple[str, str, str]
"""A row's case id, case hash and backend."""
CaseRow = CaseResult | Comparison | Ceilings
"""Rows that running cases makes."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ValidateSetup(_Model):
    """Compare cases with the golden model."""

    kind: Literal["validate"] = "validate"
    device: str
    source: str
    """The case file as the user named it, for commands that repeat a case."""
    seed: int | None = None
    """As given on the command line; chooses the weights."""
    weights: str | None = None
    """A safetensors checkpoint in place of random weights."""
    threads: int | None = None
    """Of torch; None leaves its default."""
    dump: str | None = None
    """Folder for the tensors of failing cases."""


class BenchSetup(_Model):
    """Time cases, checking them first if asked to."""

    kind: Literal["bench"] = "bench"
    device: str
    source: str
    seed: int | None = None
    weights: str | None = None
    suite: str
    folder: str
    """The run's folder, where measured ceilings are kept for a worker that starts later."""
    check: bool = True
    cross_check: bool = False
    """Beside event pairs, the span of CUPTI's records."""


Setup = Annotated[ValidateSetup | BenchSetup, Field(discriminator="kind")]


class Job(_Model):
    """One case on one or several backends."""

    case: Case
    backends: tuple[str, ...]

    @property
    def group(self) -> tuple[object, ...]:
        """Jobs of one group share weights and finalized layers."""
        return (self.backends, self.case.model, self.case.page_layout, self.case.tp)

    @property
    def keys(self) -> list[Key]:
        """Of the rows this job makes."""
        return [(self.case.id, self.case.hash, name) for name in self.backends]

    def alone(self) -> list[Job]:
        """The case on each backend by itself."""
        return [Job(case=self.case, backends=(name,)) for name in self.backends]


class Ready(_Model):
    """A worker has imported what it needs and takes jobs."""

    kind: Literal["ready"] = "ready"


class Done(_Model):
    """A job's end. With a `cause` it has no rows, and the worker is not to be used again."""

    kind: Literal["done"] = "done"
    cause: Cause | None = None
    reason: str = ""


Message = Annotated[CaseRow | Ready | Done, Field(discriminator="kind")]
SETUP: TypeAdapter[Setup] = TypeAdapter(Setup)
MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)


def jobs_of(command: str, cases: Iterable[Case], backends: Sequence[str]) -> list[Job]:
    """The jobs of a run in an order that shares weights.

    A bench interleaves its backends, so a job has them all; a validation takes one at a time.
    """
    order = sorted(cases, key=lambda case: (case.model, case.page_layout, case.tp))
    if command == "bench":
        return [Job(case=case, backends=tuple(backends)) for case in order]
    return [Job(case=case, backends=(name,)) for name in backends for case in order]


def remaining(jobs: Iterable[Job], done: set[Key]) -> list[Job]:
    """What is left of the jobs when the rows of `done` are there."""
    left = []
    for job in jobs:
        names = tuple(key[2] for key in job.keys if key not in done)
        if names:
            left.append(Job(case=job.case, backends=names))
    return left
