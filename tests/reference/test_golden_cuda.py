"""The golden model runs unchanged on a GPU."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from test_golden_layer import make_step
from torch import Tensor

from reference import layer, records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on(device: str, value: Any) -> Any:
    """A copy of nested tuples and dataclasses with every tensor on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        moved = [on(device, item) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on(device, getattr(value, f.name)) for f in fields(value)})
    return value


@pytest.mark.parametrize("nbytes", [528, 288])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_on_the_gpu_agrees_with_the_cpu(nbytes: int, dtype: torch.dtype) -> None:
    step = make_step(2, nbytes)
    host = layer.rank_step(step, dtype, bounds=True)
    device = on("cpu", layer.rank_step(on("cuda", step), dtype, bounds=True))
    assert torch.equal(device.swa.rows.bytes, host.swa.rows.bytes)
    assert torch.equal(device.swa.slots, host.swa.slots)
    assert host.compressed is not None
    assert host.compressed_selected is not None
    assert device.compressed_selected is not None
    assert torch.equal(device.compressed_selected.slots, host.compressed_selected.slots)
    assert device.compressed is not None
    slots = host.compressed.slots[host.compressed.slots >= 0]
    assert torch.equal(
        records.read_record(device.compressed.cache, slots),
        records.read_record(host.compressed.cache, slots),
    )
    same = (device.q == host.q).flatten(1).all(-1)  # a q beside a bf16 tie may round either way
    assert same.float().mean() > 0.5
    difference = (device.attended.o - host.attended.o).abs()
    assert (difference <= 2 * host.attended.bound)[same].all()
    assert torch.isfinite(device.output.float()).all()
