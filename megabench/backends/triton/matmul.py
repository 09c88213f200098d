"""The product kernels: activations to bf16, e4m3 weights streamed against them, shares added up.

Activations become bf16 once, by their own launch, since every tile of the weight reads them again.
Weights stay e4m3 in memory and become bf16 in registers (exact: a code times a power of two); dots
accumulate in float32. With few tokens the weight tile is the left operand, so that the tile's long
side is the weight's and a token costs no padding beyond 16; the loop is then bound by the weight's
bytes.
"""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megabench.backends.triton.bits import (
    activation_scale_byte,
    bf16_operand,
    bf16_to_f32,
    dot,
    e4m3_to_f32,
    f32_to_bf16,
    f32_to_e4m3,
    inverse_ue8m0,
    loop_bound,
    ue8m0_to_f32,
)
from megabench.backends.triton.target import Target
from megabench.backends.triton.tiles import e4m3_times, spread, ue8m0_to_bf16
from megabench.formats import round_up

SKINNY_TOKENS = 64
"""Up to here the weight tile is the left operand."""
PROGRAMS_PER_SM = 2
MIN_SPLIT_COLUMNS = 512
"""Columns below which a share of the reduction is not worth its partial sums."""
REDUCE_COLUMNS = 512


@dataclass(frozen=True)
class MatmulTile:
    """Tokens, weight rows and reduction columns a program works on, and how it is compiled."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int
    weight_left: bool
    splits: int = 1
    """Shares of the reduction, summed in order by a second launch."""


def matmul_tile(tokens: int, groups: int, rows: int, k: int, target: Target) -> MatmulTile:
    """A tile for `tokens` tokens against `groups` weights of `rows` rows and k columns.

    A program with few tokens is bound by the latency of its own steps, so the reduction is split
    until PROGRAMS_PER_SM of them share a multiprocessor.
    """
    if target.emulate:  # few, large steps: the interpreter pays per operation
        return MatmulTile(64, 128, 512, 1, 1, tokens <= SKINNY_TOKENS, 2 if k >= 2048 else 1)
    if tokens > SKINNY_TOKENS:
        if target.narrow:
            return MatmulTile(128, 64, 128, 8, 2, False)
        return MatmulTile(128, 128, 128, 8, 3, False)
    wide = max(16, int(triton.next_power_of_2(tokens)))
    programs = groups * round_up(rows, 64) // 64
    wanted = PROGRAMS_PER_SM * target.multiprocessors // programs
    splits = max(1, min(wanted, k // MIN_SPLIT_COLUMNS))
    return MatmulTile(wide, 64, 256, 4, 2 if target.narrow else 3, True, splits)


@triton.jit
def round_trip_kernel(
    x_ptr, x_stride, out_ptr, K, COLUMNS: tl.constexpr, EMULATE: tl.constexpr, FP8_CVT: tl.constexpr
):
    """Quantize a bf16 row per 32 columns as a linear's input, and write it back dequantized."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = bf16_to_f32(tl.load(x_ptr + row * x_stride + column, mask=column < K, other=0.0), EMULATE)
    blocks = tl.reshape(x, (COLUMNS // 32, 32))
    byte = activation_scale_byte(tl.max(tl.abs(blocks), axis=1))
    code = f32_to_e4m3(blocks * inverse_ue8m0(byte)[:, None], FP8_CVT)
    value = tl.reshape(e4m3_to_f32(code) * ue8m0_to_f32(byte)[:, None], (COLUMNS,))
    tl.store(out_ptr + row * K + column, f32_to_bf16(value, EMULATE), mask=column < K)


@triton.jit
def _dequantized(
    code_ptr,
    scale_ptr,
    row,
    rows,
    row_stride,
    scale_row,
    scale_word,
    step,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Operand [ROWS, COLUMNS] at columns step*COLUMNS.. of e4m3 codes and their packed scales.

    Scales come as words of four bytes, which a pipelined loop can fetch ahead.
    """
    W: tl.constexpr = COLUMNS // 128
    column = step * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None]
    place = row.to(tl.int64)[:, None] * row_stride + column[None, :]
    code = tl.load(code_ptr + place, mask=inside & (column < K)[None, :], other=0)
    word = step * W + tl.arange(0, W)
    place = row.to(tl.int64)[:, None] * scale_row + word.to(tl.int64)[None, :] * scale_word
    packed = tl.load(scale_ptr + place, mask=inside & (word * 128 < K)[None, :], other=0)
    byte = (packed[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 0xFF
    byte = tl.reshape(byte, (ROWS, 4 * W))
    if EMULATE:
        return e4m3_to_f32(code) * spread(ue8m0_to_f32(byte), ROWS, 4 * W, 32)
    else:
        return e4m3_times(code, spread(ue8m0_to_bf16(byte), ROWS, 4 * W, 32))


@triton.jit(do_not_specialize=["T"])
def dequantize_kernel(
    x_ptr,
    x_scale_ptr,
    x_row_stride,
    x_group_stride,
    x_scale_row,
    x_scale_word,
    x_scale_group,
    out_ptr,
    out_row_stride,
    out_group_stride,
    T,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """bf16 of e4m3 activations with packed scales."""
    group = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step = tl.program_id(1)
    x = _dequantized(
        x_ptr + group * x_group_stride,
        x_scale_ptr + group * x_scale_group,
        t,
        T,
        x_row_stride,
        x_scale_row,
        x_scale_word,
        step,
        K,
        ROWS,
        COLUMNS,
        EMULATE,
    )
    column = step * COLUMNS + tl.arange(0, COLUMNS)
    place = t.to(tl.int64)[:, None] * out_row_stride + group * out_group_stride + column[None, :]
    mask = (t < T)[:, None] & (column < K)[None, :]
    tl.store(out_ptr + place, f32_to_bf16(x.to(tl.float32), EMULATE), mask=mask)


@triton.jit(do_not_specialize=["T"])
def matmul_kernel(
    x_ptr,
    x_row_stride,
    x_group_stride,
    w_ptr,
    w_scale_ptr,
    w_row_stride,
    w_group_stride,
    w_scale_row,
    w_scale_word,
    w_scale_group,
    out_ptr,
    out_row_stride,
    out_group_stride,
    partial_ptr,
    T,
    D,
    K,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    SPLITS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """out[t, g, d] = sum over r of x[t, g, r] * w[g, d, r] of bf16 x and e4m3 w; with SPLITS the
    float32 sums of each share go to partial [SPLITS, G, T, D] instead."""
    group = tl.program_id(1).to(tl.int64)
    d_tiles = tl.cdiv(D, BD)
    t = tl.program_id(0) // d_tiles * BT + tl.arange(0, BT)
    d = tl.program_id(0) % d_tiles * BD + tl.arange(0, BD)
    x_row = x_ptr + group * x_group_stride + t.to(tl.int64)[:, None] * x_row_stride
    w_ptr += group * w_group_stride
    w_scale_ptr += group * w_scale_group
    acc = tl.zeros((BD, BT) if WEIGHT_LEFT else (BT, BD), tl.float32)
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, SPLITS)
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, steps)
    for step in range(loop_bound(first, EMULATE), loop_bound(last, EMULATE)):
        w = _dequantized(
            w_ptr,
            w_scale_ptr,
            d,
            D,
            w_row_stride,
            w_scale_row,
            w_scale_word,
            step,
            K,
            BD,
            BK,
            EMULATE,
        )
        column = step * BK + tl.arange(0, BK)
        mask = (t < T)[:, None] & (column < K)[None, :]
        x = bf16_operand(tl.load(x_row + column[None, :], mask=mask, other=0.0), EMULATE)
        if WEIGHT_LEFT:
            acc = dot(w, tl.trans(x), acc, EMULATE)
        else:
            acc = dot(x, tl.trans(w), acc, EMULATE)
    if WEIGHT_LEFT:
        acc = tl.trans(acc)
    mask = (t < T)[:, None] & (d < D)[None, :]
    row = t.to(tl.int64)[:, None]
    if SPLITS == 1:
        place = row * out_row_stride + group * out_group_stride + d[None, :]
        tl.store(out_ptr + place, f32_to_bf16(acc, EMULATE), mask=mask)
    else:
        part = (tl.program_id(2) * tl.num_programs(1) + group) * T
        tl.store(partial_ptr + (part + row) * D + d[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["T"])
def reduce_kernel(
    partial_ptr,
    out_ptr,
    out_row_stride,
    out_group_stride,
    T,
    D,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """out[t, g, d] = sum of partial [SPLITS, G, T, D] over its first dim, in order."""
    t, group = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for split in tl.static_range(SPLITS):
        part = (split * tl.num_programs(2) + group) * T + t
        total += tl.load(partial_ptr + part * D + d, mask=d < D, other=0.0)
    place = t * out_row_stride + group * out_group_stride + d
    tl.store(out_ptr + place, f32_to_bf16(total, EMULATE), mask=d < D)


def launch(
    x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, target: Target
) -> None:
    """out [G, T, D] of bf16 x [G, T, K] and e4m3 w [G, D, K] with int32 words of ue8m0 bytes
    [G, D, K/128]; any strides but the last of x, w and out."""
    groups, tokens, k = x.shape
    rows = w.shape[1]
    tile = matmul_tile(tokens, groups, rows, k, target)
    tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(rows, tile.rows)
    partial = out
    if tile.splits > 1:
        partial = out.new_empty((tile.splits, groups, tokens, rows), dtype=torch.float32)
    matmul_kernel[(tiles, groups, tile.splits)](
        x,
        x.stride(1),
        x.stride(0),
        w.view(torch.uint8),
        w_scale,
        w.stride(1),
        w.stride(0),
        w_scale.stride(1),
        w_scale.stride(2),
        w_scale.stride(0),
        out,
        out.stride(1),
        out.stride(0),
        partial,
        tokens,
        rows,
        k,
        BT=tile.tokens,
        BD=tile.rows,
        BK=tile.columns,
        WEIGHT_LEFT=tile.weight_left,
        SPLITS=tile.splits,
        EMULATE=target.emulate,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if tile.splits > 1:
        reduce_kernel[(tokens, triton.cdiv(rows, REDUCE_COLUMNS), groups)](
            partial,
            out,
            out.stride(1),
            out.stride(0),
            tokens,
            rows,
            SPLITS=tile.splits,
            COLUMNS=REDUCE_COLUMNS,
            EMULATE=target.emulate,
            num_warps=4,
        )
