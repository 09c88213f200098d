"""Checks of the arguments of a step's other ops: inserts, the gather, the index lists.

As arguments.py does for attention: each check runs before anything is written and is a ValueError
naming the argument. Nothing here reads a device value, so that ops stay capturable.
"""

from __future__ import annotations

import torch

from megabench.backends.base import Pair
from megabench.backends.checks import check_cache, check_tensor, require
from megabench.formats import (
    COMBINED_TOPK_MULTIPLE,
    FP8,
    HEAD_DIM,
    PADDED_HEADS,
    ROPE_DIM,
    V4_FP8,
    round_up,
)

_INTEGERS = (torch.int32, torch.int64)


def _check_integers(
    argument: str, tensor: torch.Tensor, size: int | None, device: torch.device
) -> None:
    """Check an int32 or int64 vector whose entries lie together."""
    require(isinstance(tensor, torch.Tensor), argument, "expected a tensor")
    if tensor.dtype not in _INTEGERS:
        raise ValueError(f"{argument}: expected int32 or int64, got {tensor.dtype}")
    check_tensor(argument, tensor, tensor.dtype, (size,), device)
    require(tensor.is_contiguous(), argument, "must be contiguous")


def _check_table(block_table: torch.Tensor, requests: int | None, device: torch.device) -> None:
    if block_table.dtype not in _INTEGERS:
        raise ValueError(f"block_table: expected int32 or int64, got {block_table.dtype}")
    check_tensor("block_table", block_table, block_table.dtype, (requests, None), device)
    require(block_table.stride(1) == 1, "block_table", "a row's entries must be contiguous")


def _check_rows(
    argument: str,
    rows: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Check rows to insert, bf16 [T, 512], and what places and rotates them."""
    device = rows.device
    check_tensor(argument, rows, torch.bfloat16, (None, HEAD_DIM), device)
    require(rows.stride(1) == 1, argument, "rows must be contiguous")
    for name, tensor in (("slot_mapping", slot_mapping), ("positions", positions)):
        _check_integers(name, tensor, rows.shape[0], device)
    check_tensor("cos_sin_cache", cos_sin_cache, torch.float32, (None, ROPE_DIM), device)
    require(cos_sin_cache.is_contiguous(), "cos_sin_cache", "must be contiguous")


def check_pad_and_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    swa_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    padded_heads: int,
) -> None:
    """Of `pad_q_and_insert_kv`."""
    check_tensor("q", q, torch.bfloat16, (None, None, HEAD_DIM), q.device)
    check_tensor("kv", kv, torch.bfloat16, (q.shape[0], HEAD_DIM), q.device)
    # As the engine's fused insert has it; the compressed insert leaves the width open.
    check_tensor("slot_mapping", slot_mapping, torch.int64, (q.shape[0],), q.device)
    check_tensor("positions", positions, torch.int64, (q.shape[0],), q.device)
    _check_rows("kv", kv, slot_mapping, positions, cos_sin_cache)
    record = check_cache("swa_cache", swa_cache, q.device)
    require(record is FP8, "swa_cache", f"holds {FP8.nbytes}-byte {FP8.name} records")
    if padded_heads not in PADDED_HEADS or padded_heads < q.shape[1]:
        raise ValueError(
            f"padded_heads: must be one of {PADDED_HEADS} and no less than q's {q.shape[1]} heads, "
            f"got {padded_heads}"
        )


def check_insert_compressed(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """Of `insert_compressed`."""
    _check_rows("latent", latent, slot_mapping, positions, cos_sin_cache)
    record = check_cache("cache", cache, latent.device)
    require(record is not V4_FP8, "cache", f"{V4_FP8.name} records are read, never written")
    require(compress_ratio >= 1, "compress_ratio", "must be at least 1")


def check_gather(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
) -> None:
    """Of `dequantize_and_gather_k_cache`."""
    device = out.device
    check_tensor("out", out, torch.bfloat16, (None, None, HEAD_DIM), device)
    require(out.stride(2) == 1, "out", "rows must be contiguous")
    check_cache("k_cache", k_cache, device)
    requests, rows = out.shape[:2]
    _check_integers("seq_lens", seq_lens, requests, device)
    if gather_lens is not None:
        _check_integers("gather_lens", gather_lens, requests, device)
    _check_table(block_table, requests, device)
    if block_size != k_cache.shape[1]:
        raise ValueError(f"block_size: {block_size} given for pages of {k_cache.shape[1]} rows")
    if not 0 <= offset <= rows:
        raise ValueError(f"offset: {offset} is outside out's {rows} rows")


def check_global_topk(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> None:
    """Of `compute_global_topk_indices_and_lens`; the per-token tensors may be those of the whole
    step, whose decodes come first."""
    device = topk_indices.device
    check_tensor("topk_indices", topk_indices, torch.int32, (None, None), device)
    require(topk_indices.stride(1) == 1, "topk_indices", "a row's entries must be contiguous")
    tokens = topk_indices.shape[0]
    _check_integers("token_to_req_indices", token_to_req_indices, None, device)
    check_tensor("is_valid_token", is_valid_token, torch.bool, (None,), device)
    require(is_valid_token.is_contiguous(), "is_valid_token", "must be contiguous")
    require(token_to_req_indices.shape[0] >= tokens, "token_to_req_indices", "too short")
    require(is_valid_token.shape[0] >= tokens, "is_valid_token", "too short")
    _check_table(block_table, None, device)
    require(block_size >= 1, "block_size", "must be at least 1")


def check_combine(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    out: Pair | None,
) -> None:
    """Of `combine_topk_swa_indices`."""
    device = topk_indices.device
    require(window_size >= 1, "window_size", "must be at least 1")
    require(compress_ratio >= 0, "compress_ratio", "must not be negative")
    require(topk >= 0, "topk", "must not be negative")
    check_tensor("topk_indices", topk_indices, torch.int32, (None, None), device)
    tokens, columns = topk_indices.shape
    if columns < topk:
        raise ValueError(f"topk_indices: {columns} columns are fewer than topk {topk}")
    require(topk == 0 or topk_indices.stride(1) == 1, "topk_indices", "rows must be contiguous")
    _check_integers("seq_lens", seq_lens, None, device)
    requests = seq_lens.shape[0]
    _check_integers("gather_lens", gather_lens, requests, device)
    _check_integers("query_start_loc", query_start_loc, requests + 1, device)
    if out is not None:
        width = round_up(topk + window_size, COMBINED_TOPK_MULTIPLE)
        check_tensor("out[0]", out[0], torch.int32, (tokens, width), device)
        require(out[0].stride(1) == 1, "out[0]", "rows must be contiguous")
        check_tensor("out[1]", out[1], torch.int32, (tokens,), device)
        require(out[1].is_contiguous(), "out[1]", "must be contiguous")
