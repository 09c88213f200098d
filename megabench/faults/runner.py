"""Wearing faults one after the other: what validation says of each on its trigger case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from megabench.cases import Case
from megabench.cases.case import DEFAULT_MODEL
from megabench.faults.base import Fault, PutOn
from megabench.faults.witness import Witness
from megabench.results import StageResult
from megabench.validate import Store, validate_case
from megabench.validate.runner import skip_reason

Outcome = Literal[
    "killed", "survived", "equivalent", "not runnable here", "missing trigger", "error"
]
BAD: tuple[Outcome, ...] = ("survived", "missing trigger", "error")
"""Outcomes after which the suite is not to be trusted: exit code 1."""
WORN = "worn"
"""The name the faulty backend has in the validator's store."""


@dataclass(frozen=True)
class Finding:
    """What became of one fault."""

    fault: Fault
    outcome: Outcome
    checks: dict[str, bool] = field(default_factory=dict)
    """Every stage with a verdict that ran: whether it found the fault."""
    reason: str = ""

    @property
    def found_by(self) -> list[str]:
        return [name for name, found in self.checks.items() if found]


@dataclass(frozen=True)
class _Run:
    digest: bytes
    stages: list[StageResult]

    def checks(self) -> dict[str, bool]:
        return {stage.name: not stage.ok for stage in self.stages if stage.verdict}


class _Bench:
    """One backend on one device: runs of cases with and without a fault."""

    def __init__(self, backend_name: str, device: torch.device, layer_seed: int) -> None:
        self.name = backend_name
        self.store = Store(device, layer_seed=layer_seed)
        self._right: dict[tuple[str, PutOn], _Run] = {}

    def right(self, case: Case, put_on: PutOn) -> _Run:
        """A case's run without the fault, made once."""
        key = case.id, put_on
        if key not in self._right:
            self._right[key] = self.run(case, put_on)
        return self._right[key]

    def run(self, case: Case, put_on: PutOn) -> _Run:
        backend = self.store.backend(self.name, case.page_layout).wrapped
        with put_on(backend) as worn:
            witness = Witness(worn)
            self.store.add_backend(WORN, witness.as_backend())
            self.store.on_rank = witness.rank
            stages = validate_case(case, WORN, self.store.device, self.store)
        return _Run(witness.digest(), stages)


def run_faults(
    faults: Iterable[Fault],
    cases: Sequence[Case],
    backend_name: str,
    device: torch.device,
    progress: Callable[[Finding], None] | None = None,
    layer_seed: int = 0,
) -> list[Finding]:
    """Every fault worn by a backend on its trigger: the case of its id in `cases`, of any model."""
    triggers = {_plain_id(case): case for case in cases}
    bench = _Bench(backend_name, device, layer_seed)
    found = []
    for fault in faults:
        finding = _examine(fault, triggers.get(fault.case), bench)
        found.append(finding)
        if progress is not None:
            progress(finding)
    return found


def _plain_id(case: Case) -> str:
    return case.model_copy(update={"model": DEFAULT_MODEL}).id


def _examine(fault: Fault, case: Case | None, bench: _Bench) -> Finding:
    device = bench.store.device
    if fault.needs and device.type != fault.needs:
        return Finding(fault, "not runnable here", reason=f"needs {fault.needs}, this is {device}")
    if case is None:
        return Finding(fault, "missing trigger", reason=f"no case {fault.case} among those given")
    obstacle = skip_reason(case, bench.name, bench.store)
    if obstacle:
        return Finding(fault, "not runnable here", reason=obstacle)
    right = bench.right(case, fault.wear.right)
    wrong = [stage for stage in right.stages if stage.verdict and not stage.ok]
    if wrong:
        reason = f"without it {fault.case} is wrong: {wrong[0].name}: {wrong[0].message}"
        return Finding(fault, "error", reason=reason)
    try:
        run = bench.run(case, fault.wear.faulty)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding(fault, "killed", {"raised": True}, reason)
    return _judge(fault, run, changed=run.digest != right.digest)


def _judge(fault: Fault, run: _Run, changed: bool) -> Finding:
    checks = run.checks()
    killed = any(checks.values())
    if fault.equivalent:
        if killed:
            return Finding(fault, "error", checks, "it is said to be equivalent, and it is not")
        return Finding(fault, "equivalent", checks, fault.equivalent)
    if not changed:
        return Finding(fault, "missing trigger", checks, f"{fault.case} is the same with it")
    return Finding(fault, "killed" if killed else "survived", checks)
