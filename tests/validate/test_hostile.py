"""Kernels with a blind spot of their own are caught by cases of ci.yaml, unknown as they are."""

from __future__ import annotations

import pytest
import torch
from hostile_backends import CASES

from megabench.backends import TorchBackend
from megabench.cases import load_suite
from megabench.validate import Store, examine

CPU = torch.device("cpu")
CI = {case.id: case for case in load_suite("ci").cases}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_a_blind_spot_is_seen(kind: type[TorchBackend], model: str, store: Store) -> None:
    """On the small model, whose linears alone differ; the last case named is the one that shows."""
    store.add_backend("hostile", kind())
    cases = [CI[name].model_copy(update={"model": model}) for name in CASES[kind]]
    rows = [examine(case, "hostile", CPU, store) for case in cases]
    assert rows[-1].status == "failed", rows[-1].reason


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_it_takes_the_right_case_to_see_it(
    kind: type[TorchBackend], model: str, store: Store
) -> None:
    """Nobody would write a kernel that is wrong everywhere."""
    store.add_backend("hostile", kind())
    case = CI["r0-nvfp4-tp1-1q5"].model_copy(update={"model": model})
    stages = {stage.name: stage for stage in examine(case, "hostile", CPU, store).stages}
    assert stages["wq_b_linear"].ok
    assert stages["lse_prefill"].ok
