"""What the vendor's ops demand of their arguments: docs/contract.md section 6, and DeepGEMM's.

Read from the binaries' own checks. A stand-in that is kinder than the vendor would let code pass
here that stops on an SM100.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RECORDS = (528, 288, 584)
OUT_WORDS = 32


def demand(condition: bool, message: str) -> None:
    """The vendor raises RuntimeError."""
    if not condition:
        raise RuntimeError(message)


def _tensor(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    demand(tensor.dtype == dtype, f"{name} must have dtype {dtype}")
    demand(tuple(tensor.shape) == shape, f"{name} must have shape {shape}, got {tensor.shape}")
    demand(tensor.shape[-1] == 1 or tensor.stride(-1) == 1, f"{name}: last dim not contiguous")


def _cache(name: str, cache: Tensor) -> int:
    """A paged cache; returns its bytes per token."""
    demand(cache.dim() == 4, f"{name} must have 4 dimensions")
    demand(
        cache.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8),
        f"{name} must have dtype fp8_e4m3fn, int8 or uint8",
    )
    nbytes = cache.shape[3]
    demand(nbytes in RECORDS, f"{name}: {nbytes} bytes per token is no known format")
    demand(cache.shape[2] == 1, "only MQA (h_kv == 1) is supported")
    demand(cache.stride(3) == 1, f"{name} must have contiguous last dimension")
    demand(cache.stride(1) == nbytes, f"{name}: the whole block must be contiguous")
    demand(cache.stride(0) % nbytes == 0, f"{name}.stride(0) must be a multiple of {nbytes}")
    demand(cache.data_ptr() % 16 == 0, f"the base address of {name} must be 16B aligned")
    return nbytes


def _index_rows(name: str, indices: Tensor) -> None:
    demand(indices.stride(0) * 4 % 32 == 0, f"{name}.stride(0) must be 32B aligned")


def _query(a: dict[str, Any]) -> tuple[int, int]:
    q = a["q"]
    demand(q.dim() == 3, "q must have 3 dimensions")
    s_q, h_q = q.shape[:2]
    demand(h_q in (64, 128), f"only h_q == 64 or 128 is supported, got {h_q}")
    _tensor("q", q, torch.bfloat16, s_q, h_q, 512)
    demand(q.stride(1) == 512, "q must be contiguous within each token")
    demand(a["d_v"] == 512, "d_v must be 512")
    return s_q, h_q


def _rest(a: dict[str, Any], s_q: int, h_q: int) -> None:
    """What decode and prefill share beyond Q and the rows."""
    if a["attn_sink"] is not None:
        _tensor("attn_sink", a["attn_sink"], torch.float32, h_q)
        demand(a["attn_sink"].is_contiguous(), "attn_sink must be contiguous")
    if a["topk_length"] is not None:
        _tensor("topk_length", a["topk_length"], torch.int32, s_q)
        demand(a["topk_length"].is_contiguous(), "topk_length must be contiguous")
    positions, table = a["token_positions"], a["cos_sin_cache"]
    _tensor("token_positions", positions, torch.int32, s_q)
    demand(positions.is_contiguous(), "token_positions must be contiguous")
    demand(table.dim() == 2, "cos_sin_cache must have 2 dimensions")
    _tensor("cos_sin_cache", table, torch.float32, table.shape[0], a["rope_dim"])
    demand(table.is_contiguous(), "cos_sin_cache must be contiguous")
    demand(not a["is_rope_neox_style"], "is_rope_neox_style must be False")
    demand(a["rope_dim"] == 64, "rope_dim must be 64")
    demand(a["n_wv_group"] > 0 and h_q % a["n_wv_group"] == 0, "n_wv_group must divide h_q")
    demand(a["num_per_channels"] == 32, "num_per_channels must be 32")
    for flag in ("use_tma_aligned_col_major_sf", "round_sf", "use_packed_ue8m0"):
        demand(a[flag] is True, f"`{flag}` must be True")
    _outputs(a, s_q, h_q)


def _outputs(a: dict[str, Any], s_q: int, h_q: int) -> None:
    out_fp8, out_sf = a.get("out_fp8"), a.get("out_sf")
    demand((out_fp8 is None) == (out_sf is None), "out_fp8 and out_sf must be provided together")
    if out_fp8 is None or out_sf is None:
        return
    groups = a["n_wv_group"]
    width = h_q // groups * 512
    demand(out_fp8.dtype == torch.float8_e4m3fn, "out_fp8 must have dtype Float8_e4m3fn")
    demand(tuple(out_fp8.shape) == (s_q, groups, width), "out_fp8 has the wrong shape")
    demand(out_fp8.is_contiguous(), "out_fp8 must be contiguous")
    demand(out_fp8.data_ptr() % 32 == 0, "out_fp8 must be 32-byte aligned")
    demand(out_sf.dtype == torch.int32, "out_sf must have dtype Int")
    demand(tuple(out_sf.shape) == (s_q, groups, width // 128), "out_sf has the wrong shape")
    demand(out_sf.stride(0) == 1, "out_sf must have stride 1 along the token dimension")
    demand(out_sf.stride(2) >= s_q, "out_sf.stride(2) must be >= s_q")
    demand(
        out_sf.stride(1) >= out_sf.shape[2] * out_sf.stride(2),
        "out_sf.stride(1) must be >= size(2) * stride(2)",
    )


def check_decode(a: dict[str, Any]) -> None:
    """RuntimeError unless the vendor's decode op would take these arguments."""
    s_q, h_q = _query(a)
    nbytes = _cache("kv", a["kv"])
    demand(nbytes != 288, "the fp4 KV cache is only supported as extra_kv")
    topk = a["indices"].shape[-1]
    _tensor("indices", a["indices"], torch.int32, s_q, topk)
    _index_rows("indices", a["indices"])
    extra_kv, extra_indices = a["extra_kv"], a["extra_indices"]
    if extra_kv is None:
        demand(extra_indices is None, "extra_indices must not be provided without extra_kv")
        demand(a["extra_topk_length"] is None, "extra_topk_length must not be provided")
    else:
        extra_bytes = _cache("extra_kv", extra_kv)
        demand(
            extra_bytes == nbytes or (nbytes, extra_bytes) == (528, 288),
            "extra_kv must have the format of kv, or the V4.1 fp4 format",
        )
        demand(extra_indices is not None, "extra_indices must be provided with extra_kv")
        _tensor("extra_indices", extra_indices, torch.int32, s_q, extra_indices.shape[-1])
        _index_rows("extra_indices", extra_indices)
        multiple = 8 if extra_bytes == 288 else 4
        demand(topk % multiple == 0, f"topk ({topk}) must be a multiple of {multiple}")
        if a["extra_topk_length"] is not None:
            _tensor("extra_topk_length", a["extra_topk_length"], torch.int32, s_q)
            demand(a["extra_topk_length"].is_contiguous(), "extra_topk_length must be contiguous")
    _rest(a, s_q, h_q)


def check_prefill(a: dict[str, Any]) -> None:
    """RuntimeError unless the vendor's prefill op would take these arguments."""
    s_q, h_q = _query(a)
    kv, indices = a["kv"], a["indices"]
    demand(kv.dim() == 3 and kv.shape[1] == 1, "only MQA (h_kv == 1) is supported")
    _tensor("kv", kv, torch.bfloat16, kv.shape[0], 1, 512)
    demand(indices.dim() == 3, "indices must have 3 dimensions")
    _tensor("indices", indices, torch.int32, s_q, 1, indices.shape[-1])
    _index_rows("indices", indices)
    demand(indices.shape[-1] % 128 == 0, f"topk ({indices.shape[-1]}) mod 128 must be 0")
    _rest(a, s_q, h_q)


def check_permute_q_b(w: Tensor, sf: Tensor, h_q: int, d_q: int) -> None:
    """RuntimeError unless permute_q_b_proj would take these arguments."""
    demand(w.dim() == 2 and sf.dim() == 2, "q_b_proj and scale_factors must have 2 dimensions")
    _tensor("q_b_proj", w, torch.float8_e4m3fn, h_q * d_q, w.shape[1])
    demand(sf.shape[1] > 0 and w.shape[1] % (4 * sf.shape[1]) == 0, "q_lora_rank / gran")
    gran = w.shape[1] // (4 * sf.shape[1])
    demand(gran in (32, 128), f"gran must be 32 or 128, got {gran}")
    demand(sf.dtype == torch.int32, "scale_factors must have dtype Int")
    demand(sf.shape[0] == w.shape[0], "scale_factors must have shape (h_q_d_q, ...)")
    demand(sf.stride(0) == 1, "scale_factors must be contiguous on the first dimension")


def check_permute_wv(w: Tensor, sf: Tensor, wv_group_size: int, d_o: int) -> None:
    """RuntimeError unless permute_wv_proj would take these arguments."""
    demand(w.dim() == 3 and sf.dim() == 3, "wv_proj and scale_factors must have 3 dimensions")
    _tensor("wv_proj", w, torch.float8_e4m3fn, *w.shape[:2], wv_group_size * d_o)
    demand(sf.dtype == torch.int32, "scale_factors must have dtype Int")
    demand(
        tuple(sf.shape) == (*w.shape[:2], w.shape[2] // 128),
        "input scale granularity must be 32",
    )
    demand(sf.stride(1) == 1, "scale_factors must be contiguous on the second dimension")


def check_scales(name: str, sf: Tensor, mn: int, k: int) -> None:
    """DeepGEMM's demands of packed ue8m0 scales [..., mn, ceil(k/128)] under recipe (1, 1, 32)."""
    demand(sf.dtype == torch.int32, f"{name}: packed ue8m0 is int32")
    demand(sf.shape[-2] == mn, f"{name}.size(-2) == {mn}")
    demand(sf.shape[-1] == -(-k // 128), f"{name}.size(-1) == ceil_div({k}, 128)")
    demand(sf.stride(-2) == 1 or mn == 1, f"{name}.stride(-2) == 1")
    demand(sf.stride(-1) == -(-mn // 4) * 4, f"{name}.stride(-1) == ceil4({mn})")
    if sf.dim() == 3:
        demand(sf.stride(-3) == sf.stride(-1) * sf.shape[-1], f"{name}.stride(-3)")
