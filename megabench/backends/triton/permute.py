"""Vendor-shaped weight permutes: wq_b rows and wo_a columns with their packed scales."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from megabench.formats import HEAD_DIM, Q_CHUNK, QUANT_GROUP
from megabench.quant import empty_mn_major

COLUMNS = 1024
"""Bytes of a row that a program moves."""


@triton.jit
def permute_rows_kernel(
    in_ptr, out_ptr, in_row, in_col, out_row, out_col, heads, width, BLOCK: tl.constexpr
):
    """Rows h*512 + c*16 + 0..15 of the input go to rows c*(heads*16) + h*16 + 0..15."""
    chunk = tl.program_id(0)
    row = (chunk * 16 + tl.arange(0, 16)).to(tl.int64)[:, None]
    first = chunk % 32 * (heads * 16) + chunk // 32 * 16
    target = (first + tl.arange(0, 16)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    value = tl.load(in_ptr + row * in_row + column * in_col, mask=column < width, other=0)
    tl.store(out_ptr + target * out_row + column * out_col, value, mask=column < width)


@triton.jit
def permute_columns_kernel(in_ptr, out_ptr, heads, width, J: tl.constexpr, BLOCK: tl.constexpr):
    """Column (h, c, j) of a contiguous row goes to (c, h, j); J is 32 for codes."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chunk, head, j = column // (heads * J), column // J % heads, column % J
    source = head * (16 * J) + chunk * J + j
    value = tl.load(in_ptr + row + source, mask=column < width)
    tl.store(out_ptr + row + column, value, mask=column < width)


@triton.jit
def permute_scale_columns_kernel(
    in_ptr,
    out_ptr,
    in_group,
    in_row,
    in_word,
    out_group,
    out_row,
    out_word,
    rows,
    heads,
    words,
    BLOCK: tl.constexpr,
):
    """Bytes (h, c) of a row's packed words go to (c, h); strides count int32 words."""
    row = tl.program_id(0).to(tl.int64)
    group, row = row // rows, row % rows
    word = tl.arange(0, BLOCK)
    value = tl.zeros((BLOCK,), tl.int32)
    for b in tl.static_range(4):
        chunk = word * 4 + b
        source = (chunk % heads) * 16 + chunk // heads
        offset = group * in_group + row * in_row + (source // 4).to(tl.int64) * in_word
        packed = tl.load(in_ptr + offset, mask=word < words, other=0)
        value = value | (((packed >> (source % 4 * 8)) & 0xFF) << (8 * b))
    target = group * out_group + row * out_row + word.to(tl.int64) * out_word
    tl.store(out_ptr + target, value, mask=word < words)


def permute_q_b_proj(
    q_b_proj: torch.Tensor, scale_factors: torch.Tensor, h_q: int, d_q: int
) -> list[torch.Tensor]:
    """Rows of w [h_q*d_q, r] and of packed scales [h_q*d_q, words] into the kernel's Q order."""
    rows, rank = q_b_proj.shape
    if d_q != HEAD_DIM or rows != h_q * d_q or d_q % Q_CHUNK:
        raise ValueError(
            f"q_b_proj: expected {h_q} heads x {HEAD_DIM} rows, got {rows} (d_q {d_q})"
        )
    weight = torch.empty_like(q_b_proj, memory_format=torch.contiguous_format)
    words = scale_factors.shape[1]
    scale = empty_mn_major(rows, 1, words, scale_factors.device)[:, 0]
    for source, out, width in (
        (q_b_proj.view(torch.uint8), weight.view(torch.uint8), rank),
        (scale_factors, scale, words),
    ):
        block = min(COLUMNS, triton.next_power_of_2(width))
        permute_rows_kernel[(rows // Q_CHUNK, triton.cdiv(width, block))](
            source, out, *source.stride(), *out.stride(), h_q, width, BLOCK=block
        )
    return [weight, scale]


def permute_wv_proj(
    wv_proj: torch.Tensor, scale_factors: torch.Tensor, wv_group_size: int, d_o: int
) -> list[torch.Tensor]:
    """Columns of w [g, d, heads*512] and of packed scales [g, d, words] into output order."""
    groups, rows, width = wv_proj.shape
    if d_o != HEAD_DIM or width != wv_group_size * d_o:
        raise ValueError(
            f"wv_proj: expected {wv_group_size} heads x {HEAD_DIM} columns, got {width} (d_o {d_o})"
        )
    source = wv_proj.contiguous().view(torch.uint8)
    weight = torch.empty_like(source)
    permute_columns_kernel[(groups * rows, triton.cdiv(width, COLUMNS))](
        source, weight, wv_group_size, width, J=QUANT_GROUP, BLOCK=COLUMNS
    )
    words = scale_factors.shape[2]
    scale = empty_mn_major(rows, groups, words, scale_factors.device).transpose(0, 1)
    permute_scale_columns_kernel[(groups * rows,)](
        scale_factors,
        scale,
        *scale_factors.stride(),
        *scale.stride(),
        rows,
        wv_group_size,
        words,
        BLOCK=triton.next_power_of_2(words),
    )
    return [weight.view(wv_proj.dtype), scale]
