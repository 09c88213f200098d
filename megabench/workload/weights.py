"""Random checkpoint weights by seed, and a layer made ready for a workload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from megabench.backends.base import Backend
from megabench.geometry import Geometry
from megabench.hashing import Stream
from megabench.layer import DeepseekV4MegaAttnAttention, LayerConfig
from megabench.quant import UE8M0_BIAS
from megabench.weights import check_checkpoint, linear_shapes, read_checkpoint, scale_shape
from megabench.workload.build import Workload
from megabench.workload.families import CODE_STD, normal_codes

_CODES_AT_A_TIME = 1 << 22

_GAIN = {"wq_b": 1.0, "wo_a": 16.0, "wo_b": 1.0}
"""Output deviation over input deviation; wo_a makes up for attention averaging its keys."""
_SCALE_STEPS = (-1, 0, 0, 1)
"""Exponents added to a linear's base scale, so that neighbouring blocks differ."""


def build_weights(
    geometry: Geometry, layer_seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """All ranks' linears in checkpoint form: `.weight` float8_e4m3fn, `.scale` uint8 a 32x32 block.

    The same bytes on every device, and whatever the TP size, so that ranks' sums agree. Sinks are a
    case's own: `Workload.attn_sink`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in linear_shapes(geometry).items():
        label = ("weights", layer_seed, name, rows, columns)
        tensors[f"{name}.weight"] = _codes(label, rows, columns, device)
        wanted = _GAIN[name] / math.sqrt(columns)
        base = UE8M0_BIAS + round(math.log2(wanted / CODE_STD) - 0.3)
        steps = torch.tensor(_SCALE_STEPS, device=device)
        words = Stream.of(*label, "scale").words(*scale_shape(rows, columns), device=device)
        tensors[f"{name}.scale"] = (base + steps[words & 3]).to(torch.uint8)
    return tensors


def checkpoint(
    geometry: Geometry, layer_seed: int, file: Path | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """The linears of a safetensors checkpoint, or random ones by seed when `file` is None.

    WeightsError when the file does not hold this model's layer. Its sinks are not used: sinks are
    an axis of cases.
    """
    if file is None:
        return build_weights(geometry, layer_seed, device)
    tensors = read_checkpoint(file)
    check_checkpoint(tensors, geometry)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _codes(
    label: tuple[object, ...], rows: int, columns: int, device: torch.device
) -> torch.Tensor:
    """float8_e4m3fn [rows, columns] of normal codes, drawn a few rows at a time."""
    table = normal_codes(device)
    out = torch.empty((rows, columns), dtype=torch.uint8, device=device)
    height = max(1, _CODES_AT_A_TIME // columns)
    for chunk, part in enumerate(torch.split(out, height)):
        uniform = Stream.of(*label, chunk).bytes(*part.shape, device=device)
        part.copy_(table[uniform.to(torch.int32)])
    return out.view(torch.float8_e4m3fn)


def make_layer(
    workload: Workload,
    backend: Backend,
    weights: Mapping[str, torch.Tensor],
    tp_rank: int = 0,
    donor: DeepseekV4MegaAttnAttention | None = None,
) -> DeepseekV4MegaAttnAttention:
    """One rank's layer, loaded, finalized, and bound to clones of the workload's caches.

    `donor`, an earlier layer of the same model, rank, backend and device, lends its finalized
    linears, so that the cases of a run load their weights once. ValueError for a topology the
    layer refuses.
    """
    case = workload.case
    config = LayerConfig(
        geometry=workload.geometry,
        backend=backend,
        compress_ratio=case.compress_ratio,
        max_model_len=workload.max_model_len,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        tp_size=case.tp,
        tp_rank=tp_rank,
        kv_cache_dtype=case.kv_cache,
        page_layout=case.page_layout,
        device=workload.device,
    )
    layer = DeepseekV4MegaAttnAttention(config)
    if donor is None:
        layer.load_weights({**weights, "attn_sink": workload.attn_sink})
        layer.finalize_loaded_weights()
    else:
        layer.adopt_linears(donor, workload.attn_sink)
    bind(layer, workload)
    return layer


def bind(layer: DeepseekV4MegaAttnAttention, workload: Workload) -> None:
    """Give a layer fresh copies of the workload's caches, and its top-k rows."""
    compressed = workload.compressed_cache
    layer.bind_kv_cache(
        clone_pages(workload.swa_cache),
        None if compressed is None else clone_pages(compressed),
    )
    if workload.topk_indices is not None:
        layer.bind_topk(workload.topk_indices)


def clone_pages(cache: torch.Tensor) -> torch.Tensor:
    """A copy of a paged cache with its page stride and the bytes around and between its pages."""
    storage = cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0).clone()
    return storage.as_strided(cache.shape, cache.stride(), cache.storage_offset())
