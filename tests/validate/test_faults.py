"""Every fault is noticed by the stage it belongs to, and by none before it."""

from __future__ import annotations

from collections.abc import Callable

import faults_of_attention  # noqa: F401  registers its faults
import faults_of_rows  # noqa: F401  likewise
import pytest
import torch
from faulty_backends import FAULTS, Fault, faulty

from megabench.cases import Case
from megabench.results.schema import StageResult
from megabench.validate import Store, validate_case

CPU = torch.device("cpu")
MakeCase = Callable[..., Case]


def wrong_stages(results: list[StageResult]) -> list[str]:
    return [stage.name for stage in results if stage.verdict and not stage.ok]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_by_its_own_stage(
    fault: Fault, make_case: MakeCase, store: Store
) -> None:
    store.add_backend(fault.name, faulty(fault))
    results = validate_case(make_case(**fault.case), fault.name, CPU, store)
    wrong = wrong_stages(results)
    assert wrong[:1] == [fault.stage], [(s.name, s.message) for s in results if s.name in wrong]
