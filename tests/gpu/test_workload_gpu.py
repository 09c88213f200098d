"""A case has the same bytes on a GPU as on a CPU."""

from __future__ import annotations

import pytest
import torch

from megabench.cases import FAMILIES, Case
from megabench.geometry import Geometry
from megabench.workload import build_weights, build_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_every_tensor_of_a_case_has_the_same_bytes_on_both_devices(family: str, cache: str) -> None:
    case = Case.model_validate(
        {
            "batch": "9q1s1500_2q3s300_1q40",
            "kv_cache": cache,
            "family": family,
            "page_padding": 1,
            "compress_ratio": 2,
        }
    )
    here, there = build_workload(case, CPU), build_workload(case, CUDA)
    for name, tensor in vars(here).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(raw(tensor), raw(getattr(there, name))), name


def test_weights_have_the_same_bytes_on_both_devices() -> None:
    here, there = (build_weights(Geometry.load(), 7, device) for device in (CPU, CUDA))
    for name, tensor in here.items():
        assert torch.equal(raw(tensor), raw(there[name])), name
