"""Dequantize each request's last cached rows into a bf16 workspace."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from megabench.backends.triton.bits import (
    e2m1_to_f32,
    e4m3_to_f32,
    f32_to_bf16,
    loop_bound,
    ue8m0_to_f32,
)
from megabench.backends.triton.pages import pages_of, row_offsets
from megabench.backends.triton.target import Target, target_of
from megabench.formats import NVFP4, PageLayout, round_up

GATHER_ROWS = 16
"""Rows a program dequantizes at a time."""
GATHER_WARPS = 8
PROGRAMS_PER_SM = 8


@triton.jit
def decode_mxfp8_rows(cache_ptr, data, scale, valid, ROWS: tl.constexpr):
    """float32 [ROWS, 512] of 528-byte records at byte offsets `data`, `scale`; else 0."""
    mask = valid[:, None]
    code = tl.load(cache_ptr + data[:, None] + tl.arange(0, 512)[None, :], mask=mask, other=0)
    byte = tl.load(cache_ptr + scale[:, None] + tl.arange(0, 16)[None, :], mask=mask, other=0)
    scales = ue8m0_to_f32(byte.to(tl.int32))
    wide = tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, 16, 32)), (ROWS, 512))
    return e4m3_to_f32(code) * wide


@triton.jit
def decode_nvfp4_rows(cache_ptr, data, scale, valid, ROWS: tl.constexpr):
    """float32 [ROWS, 512] of 288-byte records at byte offsets `data`, `scale`; else 0."""
    mask = valid[:, None]
    pair = tl.load(cache_ptr + data[:, None] + tl.arange(0, 256)[None, :], mask=mask, other=0)
    code = tl.load(cache_ptr + scale[:, None] + tl.arange(0, 32)[None, :], mask=mask, other=0)
    scales = e4m3_to_f32(code)
    wide = tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, 32, 8)), (ROWS, 256))
    nibbles = pair.to(tl.int32)
    low, high = e2m1_to_f32(nibbles & 15) * wide, e2m1_to_f32(nibbles >> 4) * wide
    return tl.reshape(tl.join(low, high), (ROWS, 512))


@triton.jit
def gather_kernel(
    out_ptr,
    out_stride_request,
    out_stride_row,
    cache_ptr,
    page_stride,
    seq_len_ptr,
    gather_len_ptr,
    table_ptr,
    table_stride,
    table_width,
    pages,
    offset,
    row_limit,
    PAGE: tl.constexpr,
    DATA_PITCH: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_PITCH: tl.constexpr,
    FP4: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_len_ptr + request)
    count = seq_len if ALL_ROWS else tl.load(gather_len_ptr + request)
    first = seq_len - count
    dim = tl.arange(0, 512)
    rows = tl.minimum(count, row_limit)
    begin, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in range(
        loop_bound(begin, EMULATE), loop_bound(rows, EMULATE), loop_bound(step, EMULATE)
    ):
        row = start + tl.arange(0, ROWS)
        inside = row < rows
        position = first + row
        column = position // PAGE
        known = inside & (position >= 0) & (column < table_width)
        page = tl.load(table_ptr + request * table_stride + column, mask=known, other=-1)
        valid = known & (page >= 0) & (page < pages)
        slot = tl.where(valid, page * PAGE + position % PAGE, 0)
        data, scale = row_offsets(slot, page_stride, PAGE, DATA_PITCH, SCALE_BASE, SCALE_PITCH)
        if FP4:
            values = decode_nvfp4_rows(cache_ptr, data, scale, valid, ROWS)
        else:
            values = decode_mxfp8_rows(cache_ptr, data, scale, valid, ROWS)
        target = (
            out_ptr + request * out_stride_request + (offset + row).to(tl.int64) * out_stride_row
        )
        tl.store(target[:, None] + dim[None, :], f32_to_bf16(values, EMULATE), mask=inside[:, None])


def _programs(rows: int, requests: int, target: Target) -> int:
    wanted = round_up(rows, GATHER_ROWS) // GATHER_ROWS
    return max(1, min(wanted, PROGRAMS_PER_SM * target.multiprocessors // requests))


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    layout: PageLayout,
) -> None:
    """out [requests, M, 512] bf16 from row `offset`: the last gather_lens (None: all) of each
    request's seq_lens cached rows, dequantized. A page outside the pool gives zero rows."""
    requests, rows = seq_lens.shape[0], out.shape[1] - offset
    if requests == 0 or rows <= 0:
        return
    pages = pages_of(k_cache, layout)
    target = target_of(out.device)
    page_stride, page_size, data_pitch, scale_base, scale_pitch = pages.addressing
    if block_size != page_size:
        raise ValueError(f"block_size: {block_size} given for a cache of {page_size}-row pages")
    gather_kernel[(_programs(rows, requests, target), requests)](
        out,
        out.stride(0),
        out.stride(1),
        k_cache.view(torch.uint8),
        page_stride,
        seq_lens,
        seq_lens if gather_lens is None else gather_lens,
        block_table,
        block_table.stride(0),
        block_table.shape[1],
        k_cache.shape[0],
        offset,
        rows,
        PAGE=page_size,
        DATA_PITCH=data_pitch,
        SCALE_BASE=scale_base,
        SCALE_PITCH=scale_pitch,
        FP4=pages.record is NVFP4,
        ALL_ROWS=gather_lens is None,
        ROWS=GATHER_ROWS,
        EMULATE=target.emulate,
        num_warps=GATHER_WARPS,
    )
