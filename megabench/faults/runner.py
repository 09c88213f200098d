"""Wearing faults one after the other: what validation says of each on its trigger case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from megabench.cases import Case
from megabench.cases.case import DEFAULT_MODEL
from megabench.devices import make_current
from megabench.faults.base import Fault, PutOn
from megabench.faults.witness import Witness
from megabench.reasons import reason_of
from megabench.results import StageResult
from megabench.validate import Store, validate_case
from megabench.validate.runner import skip_reason

Outcome = Literal[
    "killed", "survived", "equivalent", "not runnable here", "missing trigger", "error"
]
BAD: tuple[Outcome, ...] = ("survived", "missing trigger", "error")
"""Outcomes after which the suite is not to be trusted: exit code 1."""
RAISED = "raised"
"""The check that finds a fault by an exception: a backend's own, of its arguments."""
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


class Trials:
    """Faults worn by one backend on one device, each on its trigger: the case of its id in `cases`,
    of any model."""

    def __init__(
        self, cases: Sequence[Case], backend_name: str, device: torch.device, layer_seed: int = 0
    ) -> None:
        make_current(device)
        self._name = backend_name
        self._store = Store(device, layer_seed=layer_seed)
        self._triggers = {_plain_id(case): case for case in cases}
        self._right: dict[tuple[str, PutOn], _Run] = {}

    def of(self, fault: Fault) -> Finding:
        """What validation says of one fault; whatever a faulty step raises is a kill."""
        device, case = self._store.device, self._triggers.get(fault.case)
        if fault.needs and device.type != fault.needs:
            reason = f"needs {fault.needs}, this is {device}"
            return Finding(fault, "not runnable here", reason=reason)
        if case is None:
            reason = f"no case {fault.case} among those given"
            return Finding(fault, "missing trigger", reason=reason)
        try:
            obstacle = skip_reason(case, self._name, self._store)
        except MemoryError as short:
            obstacle = str(short)
        if obstacle:
            return Finding(fault, "not runnable here", reason=obstacle)
        try:
            right = self._run_right(case, fault.wear.right)
        except Exception as error:
            reason = f"without it {fault.case} raises {reason_of(error)}"
            return Finding(fault, "error", reason=reason)
        wrong = [stage for stage in right.stages if stage.verdict and not stage.ok]
        if wrong:
            reason = f"without it {fault.case} is wrong: {wrong[0].name}: {wrong[0].message}"
            return Finding(fault, "error", reason=reason)
        try:
            run = self._run(case, fault.wear.faulty)
        except Exception as error:
            return Finding(fault, "killed", {RAISED: True}, reason_of(error))
        return _judge(fault, run, changed=run.digest != right.digest)

    def _run_right(self, case: Case, put_on: PutOn) -> _Run:
        """A case's run without the fault, made once."""
        key = case.id, put_on
        if key not in self._right:
            self._right[key] = self._run(case, put_on)
        return self._right[key]

    def _run(self, case: Case, put_on: PutOn) -> _Run:
        backend = self._store.backend(self._name, case.page_layout).wrapped
        with put_on(backend) as worn:
            witness = Witness(worn)
            self._store.add_backend(WORN, witness.as_backend())
            self._store.on_rank = witness.rank
            stages = validate_case(case, WORN, self._store.device, self._store)
        return _Run(witness.digest(), stages)


def _plain_id(case: Case) -> str:
    return case.model_copy(update={"model": DEFAULT_MODEL}).id


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
