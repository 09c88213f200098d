"""What a backend is: the contract's ops, what it supports, and how one is found by name.

A backend is an object; users subclass `megabench.backends.TorchBackend` and override the ops they
bring. Names are looked up here: built-ins, entry points in the group `megabench.backends`, and
`package.module:attribute`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch

from megabench.formats import QUANT_GROUP, KVRecord, PageLayout
from megabench.geometry import Geometry

Pair = tuple[torch.Tensor, torch.Tensor]

EINSUM = "bhr,hdr->bhd"
"""The one equation `fp8_einsum` serves: tokens b, wo_a groups h."""
EINSUM_RECIPE = (1, 1, QUANT_GROUP)
"""Scale granularity of tokens, rows and columns."""


@dataclass(frozen=True)
class Support:
    """Whether a backend can run somewhere, and if not, why (one sentence for a person)."""

    ok: bool
    reason: str | None = None


@runtime_checkable
class Backend(Protocol):
    """The ops of the contract. Shapes, dtypes and errors: docs/contract.md."""

    name: str
    page_layout: PageLayout

    def supports(self, geometry: Geometry, device: torch.device, record: KVRecord) -> Support:
        """Whether this backend serves `geometry`, with `record` compressed caches, on `device`."""
        ...

    def prepare(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Told once at load of each weight that `linear` or `fp8_einsum` will read, in its final
        (permuted) form, so that derived forms are made outside the step."""
        ...

    def fused_norm_rope_attn_rope_cast_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int,
        attn_sink: torch.Tensor | None,
        topk_length: torch.Tensor | None,
        extra_kv: torch.Tensor | None,
        extra_indices: torch.Tensor | None,
        extra_topk_length: torch.Tensor | None,
        enable_q_norm: bool,
        rms_norm_eps: float,
        token_positions: torch.Tensor,
        is_rope_neox_style: bool,
        rope_dim: int,
        cos_sin_cache: torch.Tensor,
        n_wv_group: int,
        num_per_channels: int,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        out_fp8: torch.Tensor | None = None,
        out_sf: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Attention over paged quantized caches -> [out_fp8, out_sf, lse]."""
        ...

    def fused_norm_rope_attn_rope_cast_fwd(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int,
        attn_sink: torch.Tensor | None,
        topk_length: torch.Tensor | None,
        enable_q_norm: bool,
        rms_norm_eps: float,
        token_positions: torch.Tensor,
        is_rope_neox_style: bool,
        rope_dim: int,
        cos_sin_cache: torch.Tensor,
        n_wv_group: int,
        num_per_channels: int,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        out_fp8: torch.Tensor | None = None,
        out_sf: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Attention over gathered bf16 rows -> [out_fp8, out_sf, max_logits, lse]."""
        ...

    def permute_q_b_proj(
        self, q_b_proj: torch.Tensor, scale_factors: torch.Tensor, h_q: int, d_q: int
    ) -> list[torch.Tensor]:
        """wq_b rows and scales into the kernel's Q order (new tensors)."""
        ...

    def permute_wv_proj(
        self, wv_proj: torch.Tensor, scale_factors: torch.Tensor, wv_group_size: int, d_o: int
    ) -> list[torch.Tensor]:
        """wo_a columns and scales into the kernel's output order (new tensors)."""
        ...

    def pad_q_and_insert_kv(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        swa_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        padded_heads: int,
    ) -> torch.Tensor:
        """Pad Q inside every chunk and insert this step's SWA rows -> q_padded."""
        ...

    def insert_compressed(
        self,
        latent: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        compress_ratio: int,
    ) -> None:
        """Insert the compressed rows that close in this step."""
        ...

    def dequantize_and_gather_k_cache(
        self,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor | None,
        block_table: torch.Tensor,
        block_size: int,
        offset: int,
    ) -> None:
        """Dequantize each request's last rows into `out` [requests, M, 512] bf16 from `offset`."""
        ...

    def compute_global_topk_indices_and_lens(
        self,
        topk_indices: torch.Tensor,
        token_to_req_indices: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        is_valid_token: torch.Tensor,
    ) -> Pair:
        """Request-local compressed rows to slot ids -> (indices, lens)."""
        ...

    def combine_topk_swa_indices(
        self,
        topk_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor,
        window_size: int,
        compress_ratio: int,
        topk: int,
        M: int,
        N: int,
        out: Pair | None = None,
    ) -> Pair:
        """The prefill op's index lists over a chunk's workspace -> (indices, lens)."""
        ...

    def fp8_einsum(
        self, equation: str, x: Pair, w: Pair, out: torch.Tensor, recipe: tuple[int, int, int]
    ) -> None:
        """Grouped wo_a product "bhr,hdr->bhd" into `out` bf16."""
        ...

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        """x bf16 [T, K], quantized, times w e4m3 [N, K], ue8m0 [N, K/32] -> bf16 [T, N]."""
        ...


def for_live_heads(backend: Backend, live_heads: int) -> Backend:
    """`backend` told that only the first `live_heads` padded heads are read of its attention's
    outputs, where its class has a method of that name to take the hint.

    The class is asked, not the object: a wrapper that passes attributes through would return what
    it wraps, and be lost.
    """
    narrow = getattr(type(backend), "for_live_heads", None)
    return backend if narrow is None else cast(Backend, narrow(backend, live_heads))
