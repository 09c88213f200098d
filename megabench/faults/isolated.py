"""Faults worn in a process of their own, for one may leave a GPU's context beyond repair."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from megabench.cases import Case
from megabench.faults.base import CATALOGUE, Fault
from megabench.faults.runner import RAISED, Finding, Outcome, Trials

_ENDED = "it ended the process it ran in"
_NOT_STARTED = "no process to run it in would start"
_trials: list[Trials] = []
"""The child's."""

_Found = tuple[Outcome, dict[str, bool], str, bool]
"""A finding without its fault, which no pipe takes, and whether the device still works."""


class IsolatedTrials:
    """As `Trials`, in a child that is replaced once a fault has ended it or its device."""

    def __init__(self, cases: Sequence[Case], backend_name: str, device: torch.device) -> None:
        self._arguments = list(cases), backend_name, str(device)
        self._child: ProcessPoolExecutor | None = None

    def of(self, fault: Fault) -> Finding:
        """What validation says of one fault of the catalogue."""
        if self._child is None:
            self._child = ProcessPoolExecutor(
                1, get_context("spawn"), initializer=_start, initargs=self._arguments
            )
        found: _Found = "error", {}, _NOT_STARTED, False
        try:
            self._child.submit(_sound).result()
            found = "killed", {RAISED: True}, _ENDED, False
            found = self._child.submit(_trial, fault.id).result()
        except BrokenProcessPool:
            pass
        outcome, checks, reason, sound = found
        if not sound:
            self._child.shutdown()
            self._child = None
        return Finding(fault, outcome, checks, reason)


def _start(cases: Sequence[Case], backend_name: str, device: str) -> None:
    _trials[:] = [Trials(cases, backend_name, torch.device(device))]


def _trial(name: str) -> _Found:
    finding = _trials[0].of(CATALOGUE[name])
    return finding.outcome, finding.checks, finding.reason, _sound()


def _sound() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
