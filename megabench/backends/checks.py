"""Argument checks of the raw attention ops, shared by every backend of ours.

They run before anything is written and name the argument: a misuse is a ValueError, not a wrong
result. They reproduce the contract; the vendor's narrower demands (docs/contract.md) are not made.
"""

from __future__ import annotations

import torch

from megabench.formats import (
    HEAD_DIM,
    NVFP4,
    PADDED_HEADS,
    QUANT_GROUP,
    ROPE_DIM,
    V4_FP8,
    WV_GROUP_SIZE,
    KVRecord,
    record_of,
)

CACHE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def require(condition: bool, argument: str, what: str) -> None:
    """ValueError "`argument`: `what`" unless `condition`."""
    if not condition:
        raise ValueError(f"{argument}: {what}")


def check_tensor(
    argument: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
) -> None:
    """Check dtype, shape (None is any size) and device of one tensor argument."""
    require(tensor.dtype == dtype, argument, f"expected {dtype}, got {tensor.dtype}")
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    wanted = "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
    require(fits, argument, f"expected shape {wanted}, got {list(tensor.shape)}")
    require(tensor.device == device, argument, f"expected on {device}, got {tensor.device}")


def check_cache(argument: str, cache: torch.Tensor, device: torch.device) -> KVRecord:
    """Check a paged cache [blocks, page, (1,) bytes] of one-byte elements; returns its record."""
    require(cache.dtype in CACHE_DTYPES, argument, f"expected one-byte elements, got {cache.dtype}")
    require(cache.dim() in (3, 4), argument, f"expected 3 or 4 dims, got {cache.dim()}")
    require(cache.dim() == 3 or cache.shape[2] == 1, argument, "expected one KV head")
    require(cache.device == device, argument, f"expected on {device}, got {cache.device}")
    record = record_of(cache.shape[-1])
    require(
        cache.stride(-1) == 1 and cache.stride(1) == record.nbytes,
        argument,
        "rows of a page must be contiguous",
    )
    page_bytes = cache.shape[1] * record.nbytes
    require(
        cache.shape[0] <= 1 or (cache.stride(0) >= page_bytes and cache.stride(0) % 16 == 0),
        argument,
        f"page stride {cache.stride(0)} must be >= {page_bytes} and a multiple of 16",
    )
    return record


def _check_fixed(
    d_v: int,
    is_rope_neox_style: bool,
    rope_dim: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
) -> None:
    require(d_v == HEAD_DIM, "d_v", f"only {HEAD_DIM} is supported, got {d_v}")
    require(not is_rope_neox_style, "is_rope_neox_style", "only adjacent pairs (False) supported")
    require(rope_dim == ROPE_DIM, "rope_dim", f"only {ROPE_DIM} is supported, got {rope_dim}")
    require(
        num_per_channels == QUANT_GROUP,
        "num_per_channels",
        f"only {QUANT_GROUP} is supported, got {num_per_channels}",
    )
    for name, flag in (
        ("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf),
        ("round_sf", round_sf),
        ("use_packed_ue8m0", use_packed_ue8m0),
    ):
        require(flag is True, name, "only True is supported")


def _check_output(
    s_q: int,
    n_wv_group: int,
    device: torch.device,
    out_fp8: torch.Tensor | None,
    out_sf: torch.Tensor | None,
) -> None:
    require((out_fp8 is None) == (out_sf is None), "out_sf", "give out_fp8 and out_sf, or neither")
    if out_fp8 is None or out_sf is None:
        return
    width = WV_GROUP_SIZE * HEAD_DIM
    words = width // (4 * QUANT_GROUP)
    check_tensor("out_fp8", out_fp8, torch.float8_e4m3fn, (s_q, n_wv_group, width), device)
    check_tensor("out_sf", out_sf, torch.int32, (s_q, n_wv_group, words), device)
    require(out_fp8.is_contiguous(), "out_fp8", "must be contiguous")
    if s_q == 0:
        return
    strides = out_sf.stride()
    require(s_q == 1 or strides[0] == 1, "out_sf", f"token stride must be 1, got {strides[0]}")
    require(strides[2] >= s_q, "out_sf", f"word stride {strides[2]} is shorter than {s_q} tokens")
    require(
        strides[1] >= words * strides[2],
        "out_sf",
        f"group stride {strides[1]} overlaps {words} words of stride {strides[2]}",
    )


def _check_common(
    q: torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    token_positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_wv_group: int,
) -> None:
    require(q.dim() == 3, "q", f"expected [s_q, heads, {HEAD_DIM}], got {list(q.shape)}")
    s_q, heads, device = q.shape[0], q.shape[1], q.device
    check_tensor("q", q, torch.bfloat16, (s_q, heads, HEAD_DIM), device)
    require(heads in PADDED_HEADS, "q", f"head count must be one of {PADDED_HEADS}, got {heads}")
    require(
        q.stride(2) == 1 and q.stride(1) == HEAD_DIM,
        "q",
        f"the {heads} x {HEAD_DIM} of a token must be contiguous, strides {q.stride()}",
    )
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, torch.float32, (heads,), device)
    if topk_length is not None:
        check_tensor("topk_length", topk_length, torch.int32, (s_q,), device)
    check_tensor("token_positions", token_positions, torch.int32, (s_q,), device)
    check_tensor("cos_sin_cache", cos_sin_cache, torch.float32, (None, ROPE_DIM), device)
    require(cos_sin_cache.is_contiguous(), "cos_sin_cache", "must be contiguous")
    require(token_positions.is_contiguous(), "token_positions", "must be contiguous")
    require(
        n_wv_group * WV_GROUP_SIZE == heads,
        "n_wv_group",
        f"expected {heads // WV_GROUP_SIZE} for {heads} heads, got {n_wv_group}",
    )


def check_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    extra_kv: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    token_positions: torch.Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: torch.Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    out_fp8: torch.Tensor | None,
    out_sf: torch.Tensor | None,
) -> None:
    """Check every argument of the decode op; ValueError naming the first that is wrong."""
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    _check_fixed(d_v, is_rope_neox_style, rope_dim, num_per_channels, *flags)
    _check_common(q, attn_sink, topk_length, token_positions, cos_sin_cache, n_wv_group)
    s_q, device = q.shape[0], q.device
    record = check_cache("kv", kv, device)
    require(record is not NVFP4, "kv", "an NVFP4 record is for the extra cache only")
    check_tensor("indices", indices, torch.int32, (s_q, None), device)
    require(
        (extra_kv is None) == (extra_indices is None),
        "extra_indices",
        "give extra_kv and extra_indices, or neither",
    )
    if extra_kv is None or extra_indices is None:
        require(extra_topk_length is None, "extra_topk_length", "needs extra_kv")
    else:
        extra = check_cache("extra_kv", extra_kv, device)
        require(
            extra is record or (extra is NVFP4 and record is not V4_FP8),
            "extra_kv",
            f"a {extra.name} extra cache does not go beside {record.name}",
        )
        check_tensor("extra_indices", extra_indices, torch.int32, (s_q, None), device)
        if extra_topk_length is not None:
            check_tensor("extra_topk_length", extra_topk_length, torch.int32, (s_q,), device)
    _check_output(s_q, n_wv_group, device, out_fp8, out_sf)


def check_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    token_positions: torch.Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: torch.Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    out_fp8: torch.Tensor | None,
    out_sf: torch.Tensor | None,
) -> None:
    """Check every argument of the prefill op; ValueError naming the first that is wrong."""
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    _check_fixed(d_v, is_rope_neox_style, rope_dim, num_per_channels, *flags)
    _check_common(q, attn_sink, topk_length, token_positions, cos_sin_cache, n_wv_group)
    check_tensor("kv", kv, torch.bfloat16, (None, 1, HEAD_DIM), q.device)
    require(kv.stride(0) == HEAD_DIM and kv.stride(2) == 1, "kv", "rows must be contiguous")
    check_tensor("indices", indices, torch.int32, (q.shape[0], 1, None), q.device)
    _check_output(q.shape[0], n_wv_group, q.device, out_fp8, out_sf)
