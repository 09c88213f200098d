"""The package's four functions; norm, RoPE and cast arguments come first, outputs are new."""

from __future__ import annotations

import torch
from torch import Tensor


def prefill(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, ...]:
    assert not use_legacy
    return tuple(
        torch.ops.flash_mla.fused_norm_rope_attn_rope_cast_fwd(
            q,
            kv,
            indices,
            sm_scale,
            d_v,
            attn_sink,
            topk_length,
            enable_q_norm,
            rms_norm_eps,
            token_positions,
            is_rope_neox_style,
            rope_dim,
            cos_sin_cache,
            n_wv_group,
            num_per_channels,
            use_tma_aligned_col_major_sf,
            round_sf,
            use_packed_ue8m0,
        )
    )


def decode(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Tensor,
    k_cache: Tensor,
    indices_in_kvcache: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, ...]:
    assert not use_legacy
    return tuple(
        torch.ops.flash_mla.fused_norm_rope_attn_rope_cast_decode(
            q,
            k_cache,
            indices_in_kvcache,
            sm_scale,
            d_v,
            attn_sink,
            topk_length,
            extra_k_cache,
            extra_indices_in_kvcache,
            extra_topk_length,
            enable_q_norm,
            rms_norm_eps,
            token_positions,
            is_rope_neox_style,
            rope_dim,
            cos_sin_cache,
            n_wv_group,
            num_per_channels,
            use_tma_aligned_col_major_sf,
            round_sf,
            use_packed_ue8m0,
        )
    )


def permute_q_b_proj(
    weight_and_sf: tuple[Tensor, Tensor], h_q: int, d_q: int
) -> tuple[Tensor, Tensor]:
    return tuple(torch.ops.flash_mla.permute_q_b_proj(*weight_and_sf, h_q, d_q))


def permute_wv_proj(
    weight_and_sf: tuple[Tensor, Tensor], wv_group_size: int, d_o: int
) -> tuple[Tensor, Tensor]:
    return tuple(torch.ops.flash_mla.permute_wv_proj(*weight_and_sf, wv_group_size, d_o))
