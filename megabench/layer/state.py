"""What one tensor-parallel rank of the layer holds: weights, caches, table, workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from megabench.backends.base import for_live_heads
from megabench.formats import COMPRESSED_BLOCK, FP8, PREFILL_CHUNK_SIZE, WV_GROUP_SIZE, CacheDType
from megabench.geometry import cos_sin_cache, shard, topology_problem
from megabench.layer.config import LayerConfig, SWACacheLayer, resolve_compressed_record
from megabench.layout import permute_wo_a_, permute_wq_b_
from megabench.metadata import (
    DeepseekSparseSWAMetadata,
    DeepseekV4FlashMLAMetadata,
    Workspace,
    get_forward_context,
)
from megabench.quant import pack_mn_major
from megabench.weights import BlockScaledWeight, check_checkpoint, shard_linears

SF_FLAGS = (True, True, True)
"""use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: the only values there are."""
NO_Q_NORM = (False, 0.0)
"""enable_q_norm, rms_norm_eps: V4.1 norms its low-rank query before wq_b."""


class LayerState:
    """State shared by the decode and prefill paths. Life: construct, `load_weights`,
    `finalize_loaded_weights`, `bind_kv_cache`, `bind_topk`, then steps."""

    PREFILL_CHUNK_SIZE = PREFILL_CHUNK_SIZE

    wq_b: BlockScaledWeight
    wo_a: BlockScaledWeight
    wo_b: BlockScaledWeight
    wo_a_packed_scale: torch.Tensor
    """int32 [groups, o_lora_rank, 32], MN-major: what the einsum reads."""
    attn_sink: torch.Tensor
    """float32 [padded_heads], -inf beyond the live ones."""

    def __init__(self, config: LayerConfig) -> None:
        problem = topology_problem(config.geometry, config.tp_size)
        if problem:
            raise ValueError(f"{config.prefix}: {problem}.")
        if not 0 <= config.tp_rank < config.tp_size:
            raise ValueError(
                f"{config.prefix}: rank {config.tp_rank} is not one of {config.tp_size}."
            )
        if config.compress_ratio not in (0, 1, 2):
            raise ValueError(
                f"{config.prefix}: compress_ratio {config.compress_ratio} is not 0, 1 or 2."
            )
        if config.page_layout != config.backend.page_layout:
            raise ValueError(
                f"{config.prefix}: caches are written {config.page_layout}, but backend "
                f"{config.backend.name} reads {config.backend.page_layout}."
            )
        geometry, local = config.geometry, shard(config.geometry, config.tp_size)
        self.config = config
        self.prefix = config.prefix
        self.backend = for_live_heads(config.backend, local.n_local_heads)
        self.device = config.device
        self.compress_ratio = config.compress_ratio
        self.window_size = geometry.window_size
        self.o_lora_rank = geometry.o_lora_rank
        self.scale = geometry.softmax_scale
        self.max_model_len = config.max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.shard = local
        self.n_local_heads = local.n_local_heads
        self.n_local_groups = local.n_local_groups
        self.padded_heads = local.padded_heads
        self.n_wv_group = local.n_wv_group
        self.record = resolve_compressed_record(config.kv_cache_dtype, self.packed_kv_cache_dtype)
        self.compressed_cache_prefix = (
            f"{self.prefix}.compressed_cache" if self.compress_ratio else None
        )
        table = cos_sin_cache(geometry, self.max_model_len, compressed=self.compress_ratio != 0)
        self.cos_sin_cache = table.to(self.device)
        self.workspace = Workspace(self.device)
        self.topk_indices_buffer: torch.Tensor | None = None
        self._compressed_cache: torch.Tensor | None = None
        self._fused_layouts_ready = False

    # ---- interface contract -------------------------------------------------

    @property
    def accepts_unnormed_unroped_query(self) -> bool:
        """The kernel RoPEs Q itself; the fused KV insert only pads it."""
        return True

    @property
    def packed_kv_cache_dtype(self) -> CacheDType:
        """What an unspecific kv_cache_dtype means: only this kernel reads an NVFP4 cache."""
        return "nvfp4_ds_mla"

    # ---- weights ------------------------------------------------------------

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's shard of checkpoint tensors (weights.py); the only reload path.

        Clears the ready flag: `finalize_loaded_weights` must run again. ValueError names a missing
        or misshapen tensor, and then nothing has changed.
        """
        check_checkpoint(tensors, self.config.geometry)
        linears = shard_linears(tensors, self.config.geometry, self.shard, self.config.tp_rank)
        moved = {
            name: BlockScaledWeight(
                linear.weight.to(self.device), linear.weight_scale.to(self.device)
            )
            for name, linear in linears.items()
        }
        self._fused_layouts_ready = False
        self.wq_b, self.wo_a, self.wo_b = moved["wq_b"], moved["wo_a"], moved["wo_b"]
        self.attn_sink = self._local_sink(tensors["attn_sink"])

    def adopt_linears(self, other: LayerState, attn_sink: torch.Tensor) -> None:
        """Share the finalized linears of `other`, a layer of the same shard and backend, and take
        the sinks of all heads, float32 [num_heads]. Layers of one model differ in their caches and
        sinks long before they differ in anything a benchmark would reload."""
        ours, theirs = self.config, other.config
        same = (ours.geometry, ours.tp_size, ours.tp_rank, ours.backend, ours.device) == (
            theirs.geometry,
            theirs.tp_size,
            theirs.tp_rank,
            theirs.backend,
            theirs.device,
        )
        if not same or not other._fused_layouts_ready:
            raise ValueError(f"{self.prefix}: cannot share the weights of {other.prefix}.")
        self.wq_b, self.wo_a, self.wo_b = other.wq_b, other.wo_a, other.wo_b
        self.wo_a_packed_scale = other.wo_a_packed_scale
        self.attn_sink = self._local_sink(attn_sink)
        self._fused_layouts_ready = True

    def _local_sink(self, attn_sink: torch.Tensor) -> torch.Tensor:
        """This rank's sinks float32 [padded_heads], -inf beyond the live ones."""
        start = self.config.tp_rank * self.n_local_heads
        sink = torch.full((self.padded_heads,), -torch.inf, dtype=torch.float32)
        sink[: self.n_local_heads] = attn_sink[start : start + self.n_local_heads]
        return sink.to(self.device)

    def finalize_loaded_weights(self) -> None:
        """Permute wq_b rows and wo_a columns into the kernel's layouts, all or nothing.

        Idempotent: a second pass must not permute twice. A failure half-way leaves the loaded
        weights as they were, so that the call can be repeated.
        """
        if self._fused_layouts_ready:
            return
        if not hasattr(self, "wq_b"):
            raise RuntimeError(f"{self.prefix}: finalize_loaded_weights before load_weights.")
        wq_b = _clone(self.wq_b)
        wo_a = _clone(self.wo_a)
        permute_wq_b_(wq_b.weight, wq_b.weight_scale, self.n_local_heads)
        permute_wo_a_(wo_a.weight, wo_a.weight_scale, WV_GROUP_SIZE)
        wo_a_packed_scale = pack_mn_major(wo_a.weight_scale)
        self.backend.prepare(wq_b.weight, wq_b.weight_scale)
        self.backend.prepare(wo_a.weight, wo_a_packed_scale)
        self.backend.prepare(self.wo_b.weight, self.wo_b.weight_scale)
        self.wq_b, self.wo_a, self.wo_a_packed_scale = wq_b, wo_a, wo_a_packed_scale
        self._fused_layouts_ready = True

    # ---- caches -------------------------------------------------------------

    def bind_kv_cache(self, swa: torch.Tensor, compressed: torch.Tensor | None) -> None:
        """Attach the SWA cache uint8 [blocks, 32, 528] and, on compressed layers, the compressed
        cache uint8 [blocks, 128/ratio, record bytes]. Any page stride that is a multiple of 16."""
        if swa.shape[-1] != FP8.nbytes:
            raise ValueError(f"{self.prefix}: the SWA cache holds {FP8.nbytes}-byte records.")
        if (compressed is None) != (self.compress_ratio == 0):
            raise ValueError(f"{self.prefix}: a compressed cache goes with compress_ratio 1 or 2.")
        if compressed is not None:
            page = COMPRESSED_BLOCK // self.compress_ratio
            if tuple(compressed.shape[1:]) != (page, self.record.nbytes):
                raise ValueError(
                    f"{self.prefix}: compressed cache pages are [{page}, {self.record.nbytes}], "
                    f"got {list(compressed.shape[1:])}."
                )
        self.swa_cache_layer = SWACacheLayer(f"{self.prefix}.swa_cache", swa)
        self._compressed_cache = compressed

    def bind_topk(self, topk_indices: torch.Tensor) -> None:
        """Attach the indexer's buffer int32 [tokens, topk] of request-local compressed rows."""
        self.topk_indices_buffer = topk_indices

    def _compressed_kv_cache(self) -> torch.Tensor:
        assert self._compressed_cache is not None, "compressed layer without its cache"
        return self._compressed_cache

    # ---- the step in progress ----------------------------------------------

    def _step_metadata(
        self,
    ) -> tuple[DeepseekSparseSWAMetadata | None, DeepseekV4FlashMLAMetadata | None]:
        """This step's SWA and compressed metadata; (None, None) in a warm-up run."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return None, None
        swa = metadata[self.swa_cache_layer.prefix]
        assert isinstance(swa, DeepseekSparseSWAMetadata)
        if self.compressed_cache_prefix is None:
            return swa, None
        compressed = metadata[self.compressed_cache_prefix]
        assert isinstance(compressed, DeepseekV4FlashMLAMetadata)
        return swa, compressed

    def _require_fused_layouts(self) -> None:
        if not self._fused_layouts_ready:
            raise RuntimeError(
                f"{self.prefix}: wq_b / wo_a were never permuted for the mega attention kernel; "
                "refusing to run with mismatched layouts."
            )

    def _topk(self) -> torch.Tensor:
        assert self.topk_indices_buffer is not None, "bind_topk was never called"
        return self.topk_indices_buffer


def _clone(linear: BlockScaledWeight) -> BlockScaledWeight:
    return replace(linear, weight=linear.weight.clone(), weight_scale=linear.weight_scale.clone())
