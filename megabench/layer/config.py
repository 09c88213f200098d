"""What an engine's config tells the layer, and what the layer resolves from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megabench.backends.base import Backend
from megabench.formats import FP8, NVFP4, CacheDType, KVRecord, PageLayout
from megabench.geometry import Geometry


@dataclass(frozen=True)
class LayerConfig:
    """What an engine's config tells the layer.

    max_model_len and max_num_batched_tokens size the prefill workspace and the RoPE table;
    `compressed_prefix` and `swa_prefix` are the keys of the step's metadata.
    """

    geometry: Geometry
    backend: Backend
    compress_ratio: int
    max_model_len: int
    max_num_batched_tokens: int
    tp_size: int = 1
    tp_rank: int = 0
    kv_cache_dtype: CacheDType = "auto"
    page_layout: PageLayout = "interleaved"
    prefix: str = "model.layers.0.attn"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass
class SWACacheLayer:
    """The sliding-window cache as the layer holds it: uint8 [blocks, 32, 528]."""

    prefix: str
    kv_cache: torch.Tensor


def resolve_compressed_record(kv_cache_dtype: CacheDType, packed: CacheDType) -> KVRecord:
    """The compressed cache's record; `auto` and `fp8` mean the layer's packed dtype."""
    name = packed if kv_cache_dtype in ("auto", "fp8") else kv_cache_dtype
    return {FP8.name: FP8, NVFP4.name: NVFP4}[name]


def is_flashmla_mega_attn_supported() -> tuple[bool, str | None]:
    """Whether FlashMLA's fused mega-attention kernels are usable here, and if not, why."""
    if not torch.cuda.is_available():
        return False, "FlashMLA mega attention requires a CUDA device."
    if torch.cuda.get_device_capability()[0] != 10:
        return False, "FlashMLA mega attention requires sm_10x GPUs."
    ops = torch.ops._flashmla_C
    if not hasattr(ops, "fused_norm_rope_attn_rope_cast_decode"):
        return False, "vllm._flashmla_C was built without the mega attention ops."
    if not hasattr(ops, "permute_q_b_proj"):
        return False, "vllm._flashmla_C predates the mega attention weight permutes."
    return True, None
