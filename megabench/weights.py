"""Checkpoint weights: FP8 in 32x32 blocks with ue8m0 scales, their shards, and random ones by seed.

Names in a checkpoint: wq_b, wo_a, wo_b, each with `.weight` (float8_e4m3fn, or its bytes as uint8)
and `.scale` (uint8 or float8_e8m0fnu, one byte a 32x32 block), and `attn_sink` (float32, one a
head).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from megabench.formats import HEAD_DIM, QUANT_GROUP, WV_GROUP_SIZE, round_up
from megabench.geometry import Geometry, Shard

WEIGHT_BLOCK = QUANT_GROUP
LINEARS = ("wq_b", "wo_a", "wo_b")
WEIGHT_DTYPES = (torch.float8_e4m3fn, torch.uint8)
SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8)
"""What a checkpoint may hold; uint8 stands for the same bits without a type."""


@dataclass
class BlockScaledWeight:
    """One linear as a rank holds it.

    weight: float8_e4m3fn [..., N, K]; weight_scale: uint8 [..., N, K/32], a row's scales apart.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor


def linear_shapes(geometry: Geometry) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each full linear in the checkpoint."""
    return {
        "wq_b": (geometry.num_heads * HEAD_DIM, geometry.q_lora_rank),
        "wo_a": (geometry.o_groups * geometry.o_lora_rank, WV_GROUP_SIZE * HEAD_DIM),
        "wo_b": (geometry.hidden_size, geometry.o_groups * geometry.o_lora_rank),
    }


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a linear's block scales."""
    return round_up(rows, WEIGHT_BLOCK) // WEIGHT_BLOCK, columns // WEIGHT_BLOCK


class WeightsError(ValueError):
    """Weights that cannot be read or do not fit the model; one line for a person."""


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file; WeightsError names the file when it cannot be read."""
    try:
        return dict(load_file(path))
    except Exception as error:
        raise WeightsError(f"{path}: cannot be read as safetensors ({error})") from error


def digest(path: Path) -> str:
    """What tells a checkpoint file from another, whatever it is called."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def check_checkpoint(tensors: Mapping[str, torch.Tensor], geometry: Geometry) -> None:
    """WeightsError naming the first tensor that is missing or of another shape or dtype."""
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "attn_sink": ((geometry.num_heads,), (torch.float32,))
    }
    for name, (rows, columns) in linear_shapes(geometry).items():
        wanted[f"{name}.weight"] = ((rows, columns), WEIGHT_DTYPES)
        wanted[f"{name}.scale"] = (scale_shape(rows, columns), SCALE_DTYPES)
    for name, (shape, dtypes) in wanted.items():
        if name not in tensors:
            raise WeightsError(f"{name}: missing from the weights; found {sorted(tensors)}")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise WeightsError(
                f"{name}: expected {list(shape)} {kinds}, got {list(tensor.shape)} "
                f"{str(tensor.dtype).removeprefix('torch.')}"
            )


def _expand(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Block scales [ceil(N/32), K/32] to one row of scales a weight row, uint8 [N, K/32]."""
    return scale.view(torch.uint8).repeat_interleave(WEIGHT_BLOCK, 0)[:rows].contiguous()


def shard_linears(
    tensors: Mapping[str, torch.Tensor], geometry: Geometry, shard: Shard, tp_rank: int
) -> dict[str, BlockScaledWeight]:
    """One rank's linears in standard order: wq_b [H*512, r], wo_a [G, d, 4096], wo_b [hidden, G*d].

    wq_b and wo_a are split by rows (heads, groups), wo_b by columns; copies, so that permuting
    them in place leaves the checkpoint alone.
    """
    parts = {}
    for name, (rows, columns) in linear_shapes(geometry).items():
        weight = tensors[f"{name}.weight"].view(torch.float8_e4m3fn)
        scale = _expand(tensors[f"{name}.scale"], rows)
        if name == "wo_b":
            width = columns // shard.tp_size
            start = tp_rank * width
            weight = weight[:, start : start + width]
            scale = scale[:, start // QUANT_GROUP : (start + width) // QUANT_GROUP]
        else:
            height = rows // shard.tp_size
            weight = weight[tp_rank * height : (tp_rank + 1) * height]
            scale = scale[tp_rank * height : (tp_rank + 1) * height]
        parts[name] = BlockScaledWeight(_copy(weight), _copy(scale))
    groups = (shard.n_local_groups, geometry.o_lora_rank, -1)
    wo_a = parts["wo_a"]
    parts["wo_a"] = BlockScaledWeight(wo_a.weight.view(groups), wo_a.weight_scale.view(groups))
    return parts


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
