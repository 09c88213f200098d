"""A step of some of a batch's requests reads the very bytes that the whole step reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megabench.cases import Case, load_suite
from megabench.workload import Workload, build_workload, subset, tokens_of

CPU = torch.device("cpu")
(MODEL,) = {case.model for case in load_suite("faults").cases}


def workload(batch: str, **axes: object) -> Workload:
    return build_workload(Case.model_validate({"model": MODEL, "batch": batch, **axes}), CPU)


def tensors(work: Workload) -> Iterator[tuple[str, Tensor]]:
    for holder in (work, work.swa_metadata, work.compressed_metadata):
        for name, value in vars(holder).items() if holder is not None else ():
            if isinstance(value, Tensor):
                yield name, value


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_all_requests_in_their_own_order_are_the_step_itself(ratio: int) -> None:
    whole = workload("2q1s300_1q3s141_1q5", compress_ratio=ratio)
    again = subset(whole, range(4))
    names = [name for name, _ in tensors(whole)]
    assert [name for name, _ in tensors(again)] == names
    for (name, a), (_, b) in zip(tensors(whole), tensors(again), strict=True):
        assert torch.equal(a, b), name
    assert again.swa_metadata.prefill_gather_lens_cpu == [130, 5]


def test_each_request_brings_its_own_tokens_pages_and_slots() -> None:
    whole = workload("2q1s300_1q3s141", compress_ratio=2)
    part = subset(whole, [1, 2])
    assert tokens_of(whole, [1, 2]).tolist() == [1, 2, 3, 4]
    assert part.positions.tolist() == whole.positions[1:].tolist()
    assert torch.equal(part.topk_indices, whole.topk_indices[1:])
    assert torch.equal(part.swa_block_table, whole.swa_block_table[1:])
    assert torch.equal(part.swa_metadata.slot_mapping, whole.swa_metadata.slot_mapping[1:])
    assert part.swa_metadata.query_start_loc.tolist() == [0, 1, 4]
    assert (part.swa_metadata.num_decodes, part.swa_metadata.num_prefills) == (1, 1)
    assert part.swa_cache is whole.swa_cache


def test_padding_tokens_stay_behind() -> None:
    part = subset(workload("3q1s200", padding_tokens=2), [2, 0, 1])
    assert part.positions.tolist() == [199] * 3
    assert bool(part.is_valid.all())
