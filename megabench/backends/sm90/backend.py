"""The `sm90` backend: the fused decode op in CUDA C++ for Hopper, everything else from `triton`."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from megabench.backends.base import Support
from megabench.backends.checks import check_decode
from megabench.backends.sm90.launch import HEAD_TILE, blocks_of, decode_kernel, decode_params
from megabench.backends.triton.backend import TritonBackend
from megabench.formats import FP8, NVFP4, V4_FP8, KVRecord
from megabench.geometry import Geometry
from megabench.quant import alloc_mega_attn_output

CAPABILITY = (9, 0)
OFFSET_BITS = 32
"""Records are addressed in units of 16 bytes by 32-bit offsets."""


def _pool_serves(cache: torch.Tensor) -> bool:
    """Whether the kernel can read a checked cache: aligned, not empty, its offsets in range."""
    blocks, page, width = cache.shape[0], cache.shape[1], cache.shape[-1]
    return (
        width in (FP8.nbytes, NVFP4.nbytes)
        and cache.data_ptr() % 16 == 0
        and 0 < blocks * page < 2**31
        and (blocks * cache.stride(0) // 16 < 2**OFFSET_BITS or blocks == 1)
    )


def _last_dim_dense(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1


class Sm90Backend(TritonBackend):
    """CUDA C++ decode for sm_90a, compiled at run time; the rest is Triton's.

    The kernel serves 528-byte caches and 288-byte extra caches in interleaved pages, 64 or 128
    padded heads, no Q norm and a positive softmax scale; other calls go to the inherited op.
    """

    name = "sm90"

    def supports(self, geometry: Geometry, device: torch.device, record: KVRecord) -> Support:
        if record is V4_FP8:
            return Support(False, f"the sm90 kernels read no {record.name} records")
        if device.type != "cuda" or not torch.cuda.is_available():
            return Support(False, "the sm90 kernels need a CUDA device")
        capability = torch.cuda.get_device_capability(device)
        if capability != CAPABILITY:
            found = ".".join(map(str, capability))
            return Support(False, f"the sm90 kernels need compute capability 9.0, not {found}")
        if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
            return Support(False, "the sm90 kernels need cuda-bindings (pip install cuda-bindings)")
        return Support(True)

    def _serves(
        self,
        q: torch.Tensor,
        caches: tuple[torch.Tensor | None, ...],
        indices: tuple[torch.Tensor | None, ...],
        vectors: tuple[torch.Tensor | None, ...],
    ) -> bool:
        """Whether the kernel can read these arguments of a call that passed `check_decode`."""
        return (
            self.page_layout == "interleaved"
            and (self.live_heads is None or self.live_heads > q.shape[1] - HEAD_TILE // 2)
            and q.shape[0] > 0
            and q.data_ptr() % 16 == 0
            and q.stride(0) % 8 == 0
            and all(_pool_serves(cache) for cache in caches if cache is not None)
            and all(_last_dim_dense(x) for x in (*indices, *vectors) if x is not None)
        )

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
        check_decode(
            q,
            kv,
            indices,
            d_v,
            attn_sink,
            topk_length,
            extra_kv,
            extra_indices,
            extra_topk_length,
            token_positions,
            is_rope_neox_style,
            rope_dim,
            cos_sin_cache,
            n_wv_group,
            num_per_channels,
            use_tma_aligned_col_major_sf,
            round_sf,
            use_packed_ue8m0,
            out_fp8,
            out_sf,
        )
        vectors = (attn_sink, topk_length, extra_topk_length)
        if (
            enable_q_norm
            or sm_scale <= 0
            or not self._serves(q, (kv, extra_kv), (indices, extra_indices), vectors)
            or cos_sin_cache.data_ptr() % 16
            or (out_fp8 is not None and out_fp8.data_ptr() % 8)
        ):
            return super().fused_norm_rope_attn_rope_cast_decode(
                q,
                kv,
                indices,
                sm_scale,
                d_v,
                attn_sink,
                topk_length,
                extra_kv,
                extra_indices,
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
                out_fp8,
                out_sf,
            )
        if out_fp8 is None or out_sf is None:
            pair = alloc_mega_attn_output(q.shape[0], n_wv_group, q.device)
            out_fp8, out_sf = pair.data, pair.scale
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        params = decode_params(
            q,
            kv,
            indices,
            sm_scale,
            attn_sink,
            topk_length,
            extra_kv,
            extra_indices,
            extra_topk_length,
            token_positions,
            cos_sin_cache,
            out_fp8,
            out_sf,
            lse,
        )
        fp4 = extra_kv is not None and extra_kv.shape[-1] == NVFP4.nbytes
        kernel = decode_kernel(q.device.index or 0, fp4)
        kernel.launch(params, kernel.split_for(params.items, blocks_of(params)))
        return [out_fp8, out_sf, lse]
