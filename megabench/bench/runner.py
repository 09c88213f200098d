"""Bench a list of cases on one or several backends, one durable row a case and backend.

For each case: what stands in its way (a skipped row with the reason), its correctness (a wrong
case is reported and not timed), then every op and the whole step, backends interleaved.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from megabench.backends import Backend, BackendError, choose_backend, get_backend
from megabench.bench.arms import LayerPool, step_arms
from megabench.bench.ceilings import load_ceilings
from megabench.bench.cupti import Spans
from megabench.bench.measure import Arm, Bench, measure
from megabench.bench.sampling import CPU_POLICY, CUDA_POLICY, Policy
from megabench.bench.telemetry import make_probe
from megabench.cases import Case
from megabench.geometry import Geometry
from megabench.results import CaseResult, Comparison, Row, StageResult, Status
from megabench.results.names import OP_ORDER
from megabench.workload import Workload, build_workload, checkpoint, obstacle

Judge = Callable[[Case, str, torch.device], list[StageResult]]
"""Validates a case on a named backend and a device against the golden model."""


class RowSink(Protocol):
    """Where rows go: a run's folder, or a worker's way to one."""

    @property
    def path(self) -> Path:
        """The run's folder."""
        ...

    def append(self, row: Row) -> None: ...


EMPTY = "an empty step has nothing to time"


@dataclass
class BenchRun:
    """A bench run in progress: cases go in one by one, rows come out durable.

    Construction measures the ceilings (cached in the folder) and pins the CPU's threads.
    """

    folder: RowSink
    device: torch.device
    suite: str
    judge: Judge | None = None
    """None times without validating first."""
    repro: Callable[[Case, str], str] = lambda case, backend: ""
    """The command that runs a case on a backend alone."""
    policy: Policy | None = None
    spans: Spans | None = None
    """A second clock for rows that replay a graph."""
    layer_seed: int = 0
    weights_file: Path | None = None
    """A checkpoint in place of random weights."""
    weights: Callable[[Workload], Mapping[str, torch.Tensor]] | None = None
    """Checkpoint tensors of a workload's model, where the caller has them already."""
    _weights: dict[Geometry, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    _backends: dict[tuple[str, str], Backend] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device.type == "cpu":
            pin_threads()
        ceilings = load_ceilings(self.device, self.folder.path)
        self.folder.append(ceilings)
        default = CUDA_POLICY if self.device.type == "cuda" else CPU_POLICY
        l2 = None
        if self.device.type == "cuda":
            l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._bench = Bench(
            device=self.device,
            ceilings=ceilings,
            probe=make_probe(self.device),
            policy=self.policy or default,
            l2_bytes=l2,
            spans=self.spans,
        )
        self._pool = LayerPool(self.weights or self._weights_of)
        self._clear()

    def run_case(self, case: Case, backends: Sequence[str]) -> list[CaseResult]:
        """Bench one case on every backend; one row each, whatever happens."""
        clock = self._bench.clock
        clock.start()
        try:
            rows = {name: self._admit(case, name) for name in backends}
            able = [name for name in backends if rows[name].status == "measured"]
            comparisons = self._measure(case, able, rows) if able else []
        finally:
            with clock.phase("setup"):
                self._clear()
        seconds, phases = clock.stop(len(rows))
        for row in rows.values():
            row.seconds, row.phases = seconds, phases
            self.folder.append(row)
        for comparison in comparisons:
            self.folder.append(comparison)
        return list(rows.values())

    def _admit(self, case: Case, name: str) -> CaseResult:
        """The case's row on a backend: "measured" when nothing forbids timing it."""
        row = CaseResult(
            suite=self.suite,
            case_id=case.id,
            case_hash=case.hash,
            case=case.model_dump(mode="json"),
            backend=name,
            status="measured",
            tokens=case.num_tokens,
            repro=self.repro(case, name),
        )
        try:
            backend = self._backend(case, name)
            reason = obstacle(case, backend, self.device)
            if reason:
                return _ended(row, "skipped", reason)
            if self.judge is not None:
                with self._bench.clock.phase("validate"):
                    row.stages = self.judge(case, name, self.device)
                wrong = [s for s in row.stages if s.verdict and not s.ok]
                if wrong:
                    return _ended(row, "failed", f"{wrong[0].name}: {wrong[0].message}")
            if case.num_tokens == 0:
                return _ended(row, "passed" if self.judge else "skipped", EMPTY)
        except BackendError as error:
            return _ended(row, "skipped", str(error))
        except Exception as error:
            return _ended(row, "error", describe(error))
        return row

    def _measure(
        self, case: Case, able: Sequence[str], rows: dict[str, CaseResult]
    ) -> list[Comparison]:
        """Time every op of a case; a backend that breaks ends in error, the others go on."""
        with self._bench.clock.phase("setup"):
            arms = self._arms(case, able, rows)
        comparisons = []
        for op in OP_ORDER:
            present = [a[op] for n, a in arms.items() if op in a and not rows[n].raised]
            if present:
                comparisons += self._measure_op(present, rows)
        named = {"suite": self.suite, "case_id": case.id}
        return [comparison.model_copy(update=named) for comparison in comparisons]

    def _clear(self) -> None:
        """Give back what a case took, and what earlier ones left. What remains need not be walked
        by a collection amid samples."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _arms(
        self, case: Case, able: Sequence[str], rows: dict[str, CaseResult]
    ) -> dict[str, dict[str, Arm]]:
        """The case's arms by backend and op; a backend that breaks has none."""
        workload = build_workload(case, self.device)
        arms = {}
        for name in able:
            with self._breaking(rows[name]):
                arms[name] = step_arms(self._pool, workload, name, self._backend(case, name))
        return arms

    def _measure_op(self, arms: list[Arm], rows: dict[str, CaseResult]) -> list[Comparison]:
        """Time one op's arms together; if one breaks, each by itself, to find it."""
        try:
            measured, comparisons = measure(self._bench, arms)
        except Exception as error:
            if len(arms) == 1:
                _ended(rows[arms[0].backend], "error", f"{arms[0].op}: {describe(error)}")
                return []
            return [c for arm in arms for c in self._measure_op([arm], rows)]
        for arm, measurements in zip(arms, measured, strict=True):
            row = rows[arm.backend]
            row.measurements += measurements
            complaint = next((m.complaint for m in measurements if m.complaint), None)
            if complaint and row.status == "measured":
                _ended(row, "error", complaint)
        return comparisons

    @contextmanager
    def _breaking(self, row: CaseResult) -> Iterator[None]:
        """An exception inside ends the row in error and goes no further."""
        try:
            yield
        except Exception as error:
            _ended(row, "error", describe(error))

    def _backend(self, case: Case, name: str) -> Backend:
        key = (name, case.page_layout)
        if name == "auto":
            geometry = Geometry.load(case.model)
            chosen, _ = choose_backend(geometry, self.device, case.record, case.page_layout)
            key = (chosen, case.page_layout)
        if key not in self._backends:
            self._backends[key] = get_backend(key[0], case.page_layout)
        return self._backends[key]

    def _weights_of(self, workload: Workload) -> Mapping[str, torch.Tensor]:
        geometry = workload.geometry
        if geometry not in self._weights:
            self._weights[geometry] = checkpoint(
                geometry, self.layer_seed, self.weights_file, self.device
            )
        return self._weights[geometry]


def pin_threads() -> None:
    """One torch thread a usable core, unless the user's environment says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))


def describe(error: Exception) -> str:
    """An exception in one line."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def _ended(row: CaseResult, status: Status, reason: str) -> CaseResult:
    row.status, row.reason = status, reason
    return row
