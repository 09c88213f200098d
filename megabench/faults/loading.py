"""Faults of what the layer holds: permuted weights, reloads, ranks, sinks, the RoPE table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megabench.faults.base import fault, patch
from megabench.faults.triggers import MIXED, SHARDED, TWO
from megabench.formats import QUANT_GROUP
from megabench.geometry import cos_sin_cache
from megabench.layer import state
from megabench.layer.state import LayerState
from megabench.quant import pack_mn_major

HEADS, CHUNKS = 8, 16


def _reorder(tensor: Tensor, *split: int) -> None:
    """The last dim as `split`, its first two parts exchanged, in place."""
    view = tensor.view(torch.uint8)
    view.copy_(torch.unflatten(view, -1, split).transpose(-3, -2).flatten(-3))


@fault("W1", "wo_a's scales stay where they were while its columns move", TWO, "weights")
@patch(state, "permute_wo_a_")
def scales_left_behind(right: Any) -> Any:
    return lambda weight, scale, heads: right(weight, scale.clone(), heads)


@fault("W2", "wo_a's columns move in chunks of 16, not of 32", TWO, "weights")
@patch(state, "permute_wo_a_")
def chunks_of_16(right: Any) -> Any:
    def permute(weight: Tensor, scale: Tensor, heads: int) -> None:
        right(weight.clone(), scale, heads)
        _reorder(weight, HEADS, 2 * CHUNKS, QUANT_GROUP // 2)

    return permute


@fault("W3", "wo_a is permuted for 16 heads a group, not for 8", TWO, "weights")
@patch(state, "permute_wo_a_")
def sixteen_heads_a_group(right: Any) -> Any:
    def permute(weight: Tensor, scale: Tensor, heads: int) -> None:
        _reorder(weight, 2 * HEADS, CHUNKS // 2, QUANT_GROUP)
        _reorder(scale, 2 * HEADS, CHUNKS // 2, 1)

    return permute


@fault("W4", "a second pass after the load permutes again", TWO, "weights")
@patch(LayerState, "finalize_loaded_weights")
def second_pass_permutes(right: Any) -> Any:
    def finalize(self: Any) -> None:
        for _ in range(2):
            self._fused_layouts_ready = False
            right(self)

    return finalize


@fault("W5", "a reload replaces the weights without permuting them", TWO, "weights")
@patch(LayerState, "finalize_loaded_weights")
def reload_without_permuting(right: Any) -> Any:
    def finalize(self: Any) -> None:
        loaded = self.wq_b, self.wo_a
        right(self)
        self.wq_b, self.wo_a = loaded
        self.wo_a_packed_scale = pack_mn_major(self.wo_a.weight_scale)

    return finalize


@fault("W6a", "rank r takes the sinks of rank r + 1", SHARDED, "attn_sink")
@patch(LayerState, "_local_sink")
def sinks_of_the_next_rank(right: Any) -> Any:
    return lambda self, sink: right(self, sink.roll(-self.n_local_heads))


@fault("W6b", "rank r takes the heads of rank r + 1", SHARDED, "weights", "tp_sum")
@patch(state, "shard_linears")
def heads_of_the_next_rank(right: Any) -> Any:
    def sharded(tensors: Any, geometry: Any, shard: Any, rank: int) -> Any:
        return right(tensors, geometry, shard, (rank + 1) % shard.tp_size)

    return sharded


@fault("W7", "the table has the RoPE base of the other kind of layer", MIXED, "rope_table")
@patch(state, "cos_sin_cache")
def base_of_the_other_kind(right: Any) -> Any:
    return lambda geometry, positions, compressed: cos_sin_cache(
        geometry, positions, not compressed
    )


@fault("W8", "sinks of padded heads are 0", TWO, "attn_sink")
@patch(LayerState, "_local_sink")
def padded_sinks_of_zero(right: Any) -> Any:
    return lambda self, sink: torch.nan_to_num(right(self, sink), neginf=0.0)


@fault("W9", "every rank holds all of wo_b's first columns", SHARDED, "weights", "tp_sum")
@patch(state, "shard_linears")
def first_columns_everywhere(right: Any) -> Any:
    def sharded(tensors: Any, geometry: Any, shard: Any, rank: int) -> Any:
        return {
            **right(tensors, geometry, shard, rank),
            "wo_b": right(tensors, geometry, shard, 0)["wo_b"],
        }

    return sharded
