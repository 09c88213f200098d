"""Index lists: local top-k rows to slots for decode, workspace rows for prefill."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from megabench.formats import COMBINED_TOPK_MULTIPLE, round_up


@triton.jit
def global_topk_kernel(
    topk_ptr,
    topk_stride,
    request_ptr,
    table_ptr,
    table_stride,
    table_width,
    valid_ptr,
    out_ptr,
    len_ptr,
    topk,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    valid = tl.load(valid_ptr + token) != 0
    request = tl.load(request_ptr + token, mask=valid, other=0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    row = tl.load(topk_ptr + token * topk_stride + column, mask=column < topk, other=-1)
    block = row // BLOCK_SIZE
    named = valid & (row >= 0) & (block < table_width)
    page = tl.load(table_ptr + request * table_stride + block, mask=named, other=-1)
    slot = tl.where(named & (page >= 0), page * BLOCK_SIZE + row % BLOCK_SIZE, -1)
    tl.store(out_ptr + token * topk + column, slot, mask=column < topk)
    tl.store(len_ptr + token, tl.sum((valid & (row >= 0)).to(tl.int32), axis=0))


@triton.jit
def combine_kernel(
    topk_ptr,
    topk_stride,
    start_ptr,
    seq_len_ptr,
    gather_len_ptr,
    out_ptr,
    out_stride,
    len_ptr,
    requests,
    window,
    ratio,
    topk,
    M,
    N,
    width,
    WIDTH: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    token = tl.program_id(0)
    # The request of a token is the number of requests that end at or before it.
    base = tl.load(start_ptr)
    i = tl.arange(0, REQUESTS)
    ends = tl.load(start_ptr + 1 + i, mask=i < requests, other=2147483647)
    ended = tl.sum(((i < requests) & (ends - base <= token)).to(tl.int32), axis=0)
    request = tl.minimum(ended, requests - 1)
    query_end = tl.load(start_ptr + request + 1) - base
    seq_len = tl.load(seq_len_ptr + request)
    gather_start = seq_len - tl.load(gather_len_ptr + request)
    position = seq_len - query_end + token
    compressed = tl.where(ratio > 0, (position + 1) // tl.maximum(ratio, 1), 0)
    k = tl.maximum(tl.minimum(compressed, topk), 0)
    swa_start = tl.maximum(tl.maximum(position - window + 1, 0), gather_start)
    w = tl.maximum(position - swa_start + 1, 0)

    column = tl.arange(0, WIDTH)
    row = tl.load(topk_ptr + token.to(tl.int64) * topk_stride + column, mask=column < k, other=-1)
    workspace = M * request
    picked = tl.where((row >= 0) & (row < N), row + workspace, -1)
    slid = workspace + N + swa_start - gather_start + column - k
    entry = tl.where(column < k, picked, tl.where(column < k + w, slid, -1))
    tl.store(out_ptr + token.to(tl.int64) * out_stride + column, entry, mask=column < width)
    tl.store(len_ptr + token, k + w)


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request-local compressed rows [T, topk] to slot ids, holes in place, and the count of
    non-negative entries a row; 0 and an all -1 row for padding tokens."""
    tokens, topk = topk_indices.shape
    slots = topk_indices.new_empty((tokens, topk), dtype=torch.int32)
    lens = topk_indices.new_empty((tokens,), dtype=torch.int32)
    if tokens:
        global_topk_kernel[(tokens,)](
            topk_indices,
            topk_indices.stride(0),
            token_to_req_indices,
            block_table,
            block_table.stride(0),
            block_table.shape[1],
            is_valid_token.view(torch.uint8),
            slots,
            lens,
            topk,
            BLOCK_SIZE=block_size,
            WIDTH=triton.next_power_of_2(max(topk, 1)),
            num_warps=4,
        )
    return slots, lens


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's index lists over its workspace [requests * M, 512], and their lengths.

    Each row: up to topk compressed rows, then the sliding window, then -1, in
    round_up(topk + window, 128) columns. query_start_loc may start anywhere.
    """
    tokens = topk_indices.shape[0]
    width = round_up(topk + window_size, COMBINED_TOPK_MULTIPLE)
    if out is None:
        out = (
            topk_indices.new_empty((tokens, width), dtype=torch.int32),
            topk_indices.new_empty((tokens,), dtype=torch.int32),
        )
    indices, lens = out
    requests = seq_lens.shape[0]
    if tokens and requests:
        combine_kernel[(tokens,)](
            topk_indices,
            topk_indices.stride(0),
            query_start_loc,
            seq_lens,
            gather_lens,
            indices,
            indices.stride(0),
            lens,
            requests,
            window_size,
            compress_ratio,
            topk,
            M,
            N,
            width,
            WIDTH=triton.next_power_of_2(width),
            REQUESTS=triton.next_power_of_2(requests),
            num_warps=4,
        )
    return indices, lens
