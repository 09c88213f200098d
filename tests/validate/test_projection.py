"""The sum over ranks: anchored at every rank's own bytes, and at the unsharded weight."""

from __future__ import annotations

import torch

from megabench.validate.stages.projection import tp_sum
from reference.linear import dequantize_weight, linear

RANKS, TOKENS, WIDTH, HIDDEN = 4, 3, 128, 96


def a_sum() -> tuple[list[torch.Tensor], list[torch.Tensor], object]:
    """Each rank's z, its bf16 output, and the unsharded weight."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, (HIDDEN, RANKS * WIDTH), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 122, (HIDDEN, RANKS * WIDTH // 32), generator=generator)
    scales = scales.to(torch.uint8)
    latents = [torch.randn(TOKENS, WIDTH, generator=generator).bfloat16() for _ in range(RANKS)]
    shards = zip(codes.chunk(RANKS, 1), scales.chunk(RANKS, 1), strict=True)
    outputs = [linear(z, *shard).value.bfloat16() for z, shard in zip(latents, shards, strict=True)]
    return latents, outputs, dequantize_weight(codes, scales)


def test_ranks_that_hold_their_own_columns_sum_to_the_whole() -> None:
    judged = tp_sum(*a_sum())
    assert judged.ok
    assert judged.checked == TOKENS * HIDDEN
    assert 0 < judged.worst < 1


def test_a_rank_counted_twice_is_wrong() -> None:
    latents, outputs, weight = a_sum()
    assert not tp_sum(latents, [outputs[0], outputs[0], *outputs[2:]], weight).ok


def test_ranks_that_hold_each_others_columns_are_wrong() -> None:
    latents, outputs, weight = a_sum()
    assert not tp_sum([latents[1], latents[0], *latents[2:]], outputs, weight).ok


def test_one_element_off_by_two_bf16_steps_is_wrong() -> None:
    latents, outputs, weight = a_sum()
    row, column = divmod(int(outputs[0].abs().argmax()), HIDDEN)
    sizes = torch.stack([output.abs() for output in outputs])[:, row, column]
    outputs[0][row, column] += 2 * 2.0**-7 * float(sizes.sum())
    judged = tp_sum(latents, outputs, weight)
    assert (judged.failed, judged.where["token"], judged.where["column"]) == (1, row, column)
