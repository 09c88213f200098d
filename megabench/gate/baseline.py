"""Baselines: what a run measured and how right it was, a JSONL shard per device and suite.

    reports/baselines/nvidia-h200/h200.jsonl

The first line is the environment, then one line a fact, sorted, so that `git diff` shows exactly
which case, backend, op and column moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from megabench.cases.located import nearest
from megabench.gate.environment import clock_policy
from megabench.gate.lines import Line, read_lines, text_of
from megabench.gate.observe import Observed, observe
from megabench.gate.processes import GateError, header_of, read_processes, suite_of
from megabench.results import Environment, Run
from megabench.results.schema import Column
from megabench.results.store import RESULTS

BASELINE_VERSION = 1
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
CORRECTNESS, KERNELS = "correctness", "kernels"


class BaselineHeader(Line):
    """First line of a shard: what it was measured on, and by which code."""

    kind: Literal["baseline"] = "baseline"
    baseline_version: int = BASELINE_VERSION
    suite: str
    recorded: str
    """When the run started, UTC."""
    megabench_version: str
    git_commit: str | None
    processes: int
    clocks: str
    """"application", "default" or "unknown": see `megabench.gate.environment.clock_policy`."""
    environment: Environment


class _Entry(Line):
    case_id: str
    case_hash: str
    backend: str
    op: str
    column: str


class TimeEntry(_Entry):
    """One op's median in each process."""

    kind: Literal["time"] = "time"
    column: Column
    medians_us: Annotated[list[Positive], Field(min_length=1)]
    clocks_mhz: list[Positive] = Field(default_factory=list)
    """SM clock of each process; empty when not known."""

    @model_validator(mode="after")
    def _a_clock_a_process(self) -> Self:
        if self.clocks_mhz and len(self.clocks_mhz) != len(self.medians_us):
            counts = f"{len(self.clocks_mhz)} clocks for {len(self.medians_us)} medians"
            raise ValueError(counts)
        return self


class PairsEntry(_Entry):
    """One op's ratio to a reference backend, from ABBA pairs."""

    kind: Literal["pairs"] = "pairs"
    column: Column
    reference: str
    ratio: Positive
    low: Positive
    high: Positive
    pairs: Annotated[int, Field(ge=1)]


class KernelsEntry(_Entry):
    """Kernels a step launches."""

    kind: Literal["kernels"] = "kernels"
    op: Literal["step"] = "step"
    column: Literal["kernels"] = "kernels"
    count: int


class CorrectnessEntry(_Entry):
    """Worst error / bound of every judged stage."""

    kind: Literal["correctness"] = "correctness"
    op: Literal["all"] = "all"
    column: Literal["correctness"] = "correctness"
    stages: dict[str, float]


Entry = TimeEntry | PairsEntry | KernelsEntry | CorrectnessEntry
_HEADER: TypeAdapter[BaselineHeader] = TypeAdapter(BaselineHeader)
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


@dataclass(frozen=True)
class Baseline:
    """A shard in memory, entries sorted."""

    header: BaselineHeader
    entries: list[Entry]

    def text(self) -> str:
        """The shard's lines."""
        return text_of([self.header, *self.entries])


def entry_key(entry: Entry) -> tuple[str, ...]:
    """What makes an entry the same one in two shards, and its place in a shard."""
    reference = entry.reference if isinstance(entry, PairsEntry) else ""
    return entry.case_id, entry.backend, entry.op, entry.column, reference, entry.case_hash


def baseline_of(runs: list[Run]) -> Baseline:
    """What a run would record as a baseline; faults of its cases are not looked at here."""
    header = header_of(runs)
    entries = [
        entry
        for (case_id, backend), seen in observe(runs).items()
        for entry in _entries(case_id, backend, seen)
    ]
    return Baseline(
        BaselineHeader(
            suite=suite_of(runs),
            recorded=header.started,
            megabench_version=header.megabench_version,
            git_commit=header.git_commit,
            processes=len(runs),
            clocks=clock_policy(runs),
            environment=header.environment,
        ),
        sorted(entries, key=entry_key),
    )


def shard_path(folder: Path, device_name: str, suite: str) -> Path:
    """Where a device's baseline of a suite lies under `folder`."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return folder / slug / f"{suite}.jsonl"


def read_shard(path: Path) -> Baseline:
    """A shard read back. GateError naming file, line and field when it is not one."""
    header, entries = read_lines(path, _HEADER, _ENTRY)
    if header.baseline_version != BASELINE_VERSION:
        version = header.baseline_version
        raise GateError(f"{path}: baseline version {version}, this is for {BASELINE_VERSION}")
    first: dict[tuple[str, ...], int] = {}
    for number, entry in enumerate(entries, start=2):
        earlier = first.setdefault(entry_key(entry), number)
        if earlier != number:
            raise GateError(f"{path}:{number}: tells of the same as line {earlier}")
    return Baseline(header, sorted(entries, key=entry_key))


def find_baseline(path: Path, device_name: str, suite: str) -> Baseline:
    """The baseline at `path`: a shard, a run, or a folder of shards, one of them this device's.

    GateError with the nearest shard when the folder has none for the device and suite.
    """
    if path.is_file():
        return baseline_of(read_processes(path)) if path.name == RESULTS else read_shard(path)
    if not path.is_dir():
        raise GateError(f"{path}: no such baseline")
    if (path / RESULTS).is_file() or any(path.glob(f"*/{RESULTS}")):
        return baseline_of(read_processes(path))
    shard = shard_path(path, device_name, suite)
    if shard.is_file():
        return read_shard(shard)
    wanted = shard.relative_to(path)
    there = [str(p.relative_to(path)) for p in sorted(path.glob("*/*.jsonl"))]
    raise GateError(
        f"{path}: has no {wanted}{nearest(wanted, there)} "
        "(megabench baseline update RUN --accept makes it)"
    )


def _entries(case_id: str, backend: str, seen: Observed) -> Iterator[Entry]:
    case_hash = seen.case_hash
    stages = {name: float(f"{worst:.4g}") for name, worst in seen.stages().items()}
    if stages:
        yield CorrectnessEntry(case_id=case_id, case_hash=case_hash, backend=backend, stages=stages)
    counts = seen.kernels()
    if len(counts) == 1:
        yield KernelsEntry(
            case_id=case_id, case_hash=case_hash, backend=backend, count=counts.pop()
        )
    for op, column in seen.time_keys():
        times = seen.times(op, column)
        if times.processes:
            yield TimeEntry(
                case_id=case_id,
                case_hash=case_hash,
                backend=backend,
                op=op,
                column=column,
                medians_us=[_rounded(t) for t in times.medians_us],
                clocks_mhz=[round(c, 1) for c in times.clocks_mhz],
            )
    for (op, column, reference), pairs in seen.pairs().items():
        yield PairsEntry(
            case_id=case_id,
            case_hash=case_hash,
            backend=backend,
            op=op,
            column=column,
            reference=reference,
            ratio=round(pairs.ratio, 5),
            low=round(pairs.low, 5),
            high=round(pairs.high, 5),
            pairs=pairs.pairs,
        )


def _rounded(us: float) -> float:
    """Five digits, and nothing below a nanosecond: finer than any threshold, short in a diff."""
    return round(float(f"{us:.5g}"), 3)
