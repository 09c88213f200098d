"""Golden weights of a run's model: dequantized once, in standard order, shared by all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from reference.layer import PreparedWeights, Weights
from reference.linear import Weight
from reference.model import HEADS_PER_GROUP, Model

BLOCK = 32
"""Rows and columns under one checkpoint scale."""


def standard_weights(checkpoint: Mapping[str, Tensor], model: Model, sinks: Tensor) -> Weights:
    """Checkpoint tensors (32x32 block scales) as golden weights of the whole layer."""

    def codes(name: str) -> Tensor:
        return checkpoint[f"{name}.weight"].view(torch.uint8)

    def scales(name: str) -> Tensor:
        blocks = checkpoint[f"{name}.scale"].view(torch.uint8)
        return blocks.repeat_interleave(BLOCK, 0)[: len(codes(name))]

    group = (model.o_groups, model.o_lora_rank, -1)
    return Weights(
        wq_b=codes("wq_b"),
        wq_b_scale=scales("wq_b"),
        wo_a=codes("wo_a").view(group),
        wo_a_scale=scales("wo_a").view(group),
        wo_b=codes("wo_b"),
        wo_b_scale=scales("wo_b"),
        sinks=sinks,
    )


def _shard(weight: Weight, tp: int, rank: int, dim: int = 0) -> Weight:
    return Weight(weight.value.chunk(tp, dim)[rank], weight.norms.chunk(tp, dim)[rank])


@dataclass(frozen=True)
class GoldenWeights:
    """One model's weights, quantized and dequantized, without sinks (a case has its own)."""

    quantized: Weights
    prepared: PreparedWeights

    @classmethod
    def of(
        cls, checkpoint: Mapping[str, Tensor], model: Model, dtype: torch.dtype = torch.float32
    ) -> GoldenWeights:
        none = torch.zeros(model.num_heads)
        quantized = standard_weights(checkpoint, model, none)
        return cls(quantized, quantized.prepare(dtype))

    def shard(self, tp: int, rank: int, sinks: Tensor) -> PreparedWeights:
        """Rank `rank`'s part, as views; `sinks` float32 of all heads."""
        whole = self.prepared
        return PreparedWeights(
            _shard(whole.wq_b, tp, rank),
            _shard(whole.wo_a, tp, rank),
            _shard(whole.wo_b, tp, rank, dim=1),
            sinks.chunk(tp)[rank],
        )


@contextmanager
def full_precision() -> Iterator[None]:
    """Golden products in float32 whatever a backend's module has set for its own (TF32)."""
    on_gpu, on_cpu = torch.backends.cuda, cast(Any, torch.backends.mkldnn)
    settings = on_gpu.matmul, on_cpu.matmul
    kept = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, kept, strict=True):
            setting.fp32_precision = precision


def live_heads(model: Model, tp: int) -> int:
    """Heads of one rank."""
    return model.num_heads // tp


def live_groups(model: Model, tp: int) -> int:
    """wo_a groups of one rank."""
    return model.num_heads // HEADS_PER_GROUP // tp
