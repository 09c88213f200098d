"""A layer's weights once more where others were, as an engine's reload may leave them: what a
backend keeps by address is then another weight's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megabench.backends.base import EINSUM, EINSUM_RECIPE
from megabench.layer import DeepseekV4MegaAttnAttention
from megabench.validate.poison import POISONS, CanariedOutput, Fenced


def reload_weights(layer: DeepseekV4MegaAttnAttention) -> None:
    """Prepare and use other codes at the addresses of a finalized layer's, then prepare the right
    ones there, as tensors of their own."""
    backend, device = layer.backend, layer.device
    for name in ("wq_b", "wo_b"):
        old = getattr(layer, name)
        weight, scale = old.weight.clone(), old.weight_scale
        row = torch.zeros(1, weight.shape[1], dtype=torch.bfloat16, device=device)
        with _others_in(weight) as other:
            backend.prepare(other, scale)
            backend.linear(row, other, scale)
        setattr(layer, name, replace(old, weight=weight))
        backend.prepare(weight, scale)
    weight, scale = layer.wo_a.weight, layer.wo_a_packed_scale
    groups, columns, _ = weight.shape
    poison, pair = POISONS[1], CanariedOutput.make(1, layer.n_wv_group, device, POISONS[1]).pair
    x = pair.data[:, :groups], pair.scale[:, :groups]
    out = Fenced.dense((1, groups, columns), torch.bfloat16, device, poison, poison.data).tensor
    with _others_in(weight) as other:
        backend.prepare(other, scale)
        backend.fp8_einsum(EINSUM, x, (other, scale), out, EINSUM_RECIPE)
    layer.wo_a = replace(layer.wo_a, weight=weight.view(weight.shape))
    backend.prepare(layer.wo_a.weight, scale)


@contextmanager
def _others_in(weight: Tensor) -> Iterator[Tensor]:
    """A weight's memory with its rows in reverse order while inside, as another tensor."""
    codes = weight.view(torch.uint8)
    kept = codes.clone()
    codes.copy_(kept.flip(-2))
    try:
        yield weight.view(weight.shape)
    finally:
        codes.copy_(kept)
