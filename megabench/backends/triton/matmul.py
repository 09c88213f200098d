"""Products of exactly dequantized fp8 operands: the wq_b and wo_b linears and the wo_a einsum.

Weights stay e4m3 in memory and become bf16 in registers (exact: a code times a power of two); dots
accumulate in float32. With few tokens the weight tile is the left operand, so that the tile's long
side is the weight's and a token costs no padding beyond 16; the loop is then bound by the weight's
bytes. With many tokens the token tile is the left operand.
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
from megabench.backends.triton.target import Target, target_of
from megabench.backends.triton.tiles import e4m3_times, spread, ue8m0_to_bf16
from megabench.formats import QUANT_GROUP

ROUND_TRIP_COLUMNS = 1024
SKINNY_TOKENS = 64
"""Up to here the weight tile is the left operand."""


@dataclass(frozen=True)
class MatmulTile:
    """Tokens, weight rows and reduction columns a program works on, and how it is compiled."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int
    weight_left: bool


def matmul_tile(tokens: int, groups: int, rows: int, target: Target) -> MatmulTile:
    """A tile for `tokens` tokens against `groups` weights of `rows` rows."""
    if target.emulate:  # few, large steps: the interpreter pays per operation
        return MatmulTile(64, 128, 512, 1, 1, tokens <= SKINNY_TOKENS)
    if tokens <= SKINNY_TOKENS:
        wide = max(16, triton.next_power_of_2(tokens))
        few = groups * triton.cdiv(rows, 64) < target.multiprocessors
        return MatmulTile(wide, 32 if few else 64, 128, 4, 4, True)
    return MatmulTile(128, 128, 64, 8, 3, False)


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
    """Operand [ROWS, COLUMNS] at columns step*COLUMNS.. of e4m3 codes and their scale bytes.

    Byte c of a row's scales lies at row*scale_row + c//4*scale_word + c%4.
    """
    column = step * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None]
    place = row.to(tl.int64)[:, None] * row_stride + column[None, :]
    code = tl.load(code_ptr + place, mask=inside & (column < K)[None, :], other=0)
    chunk = step * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    place = row.to(tl.int64)[:, None] * scale_row
    place += ((chunk // 4).to(tl.int64) * scale_word + chunk % 4)[None, :]
    byte = tl.load(scale_ptr + place, mask=inside & (chunk * 32 < K)[None, :], other=0)
    if EMULATE:
        scale = ue8m0_to_f32(byte.to(tl.int32))
        return e4m3_to_f32(code) * spread(scale, ROWS, COLUMNS // 32, 32)
    else:
        return e4m3_times(code, spread(ue8m0_to_bf16(byte), ROWS, COLUMNS // 32, 32))


@triton.jit(do_not_specialize=["T"])
def matmul_kernel(
    x_ptr,
    x_scale_ptr,
    x_row_stride,
    x_group_stride,
    x_scale_row,
    x_scale_word,
    x_scale_group,
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
    T,
    D,
    K,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    X_BF16: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """out[t, g, d] = sum over r of x[t, g, r] * w[g, d, r]; scale strides are in bytes."""
    group = tl.program_id(1).to(tl.int64)
    d_tiles = tl.cdiv(D, BD)
    t = tl.program_id(0) // d_tiles * BT + tl.arange(0, BT)
    d = tl.program_id(0) % d_tiles * BD + tl.arange(0, BD)
    x_ptr += group * x_group_stride
    w_ptr += group * w_group_stride
    x_scale_ptr = x_scale_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + group * x_scale_group
    w_scale_ptr = w_scale_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + group * w_scale_group
    acc = tl.zeros((BD, BT) if WEIGHT_LEFT else (BT, BD), tl.float32)
    for step in range(0, loop_bound(tl.cdiv(K, BK), EMULATE)):
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
        if X_BF16:
            column = step * BK + tl.arange(0, BK)
            place = t.to(tl.int64)[:, None] * x_row_stride + column[None, :]
            mask = (t < T)[:, None] & (column < K)[None, :]
            x = bf16_operand(tl.load(x_ptr + place, mask=mask, other=0.0), EMULATE)
        else:
            x = _dequantized(
                x_ptr,
                x_scale_ptr,
                t,
                T,
                x_row_stride,
                x_scale_row,
                x_scale_word,
                step,
                K,
                BT,
                BK,
                EMULATE,
            )
        if WEIGHT_LEFT:
            acc = dot(w, tl.trans(x), acc, EMULATE)
        else:
            acc = dot(x, tl.trans(w), acc, EMULATE)
    if WEIGHT_LEFT:
        acc = tl.trans(acc)
    place = t.to(tl.int64)[:, None] * out_row_stride + group * out_group_stride + d[None, :]
    tl.store(out_ptr + place, f32_to_bf16(acc, EMULATE), mask=(t < T)[:, None] & (d < D)[None, :])


def _byte_strides(scale: torch.Tensor) -> tuple[int, int]:
    """Bytes from a row's scales to the next row's, and from one four of them to the next."""
    if scale.dtype == torch.int32:
        return 4 * scale.stride(-2), 4 * scale.stride(-1)
    return scale.stride(-2), 4


def _launch(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    target: Target,
) -> None:
    """out [T, G, D] of x [T, G, K] (bf16, or e4m3 with packed scales) and w [G, D, K]."""
    tokens, groups, k = x.shape
    rows = w.shape[1]
    tile = matmul_tile(tokens, groups, rows, target)
    x_scale_row, x_scale_word, x_scale_group = 0, 0, 0
    if x_scale is not None:
        by_group = x_scale.transpose(0, 1)
        x_scale_row, x_scale_word = _byte_strides(by_group)
        x_scale_group = 4 * x_scale.stride(1)
    w_scale_row, w_scale_word = _byte_strides(w_scale)
    grid = (triton.cdiv(tokens, tile.tokens) * triton.cdiv(rows, tile.rows), groups)
    matmul_kernel[grid](
        x if x_scale is None else x.view(torch.uint8),
        w_scale if x_scale is None else x_scale,
        x.stride(0),
        x.stride(1),
        x_scale_row,
        x_scale_word,
        x_scale_group,
        w.view(torch.uint8),
        w_scale,
        w.stride(1),
        w.stride(0),
        w_scale_row,
        w_scale_word,
        w_scale.stride(0) * w_scale.element_size(),
        out,
        out.stride(0),
        out.stride(1),
        tokens,
        rows,
        k,
        BT=tile.tokens,
        BD=tile.rows,
        BK=tile.columns,
        WEIGHT_LEFT=tile.weight_left,
        X_BF16=x_scale is None,
        EMULATE=target.emulate,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def linear(x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
    """bf16 [T, N] of x bf16 [T, K], quantized per token and 32 columns, and w e4m3 [N, K] with sw
    uint8 [N, K/32]."""
    tokens, k = x.shape
    out = x.new_empty((tokens, w.shape[0]))
    if tokens == 0:
        return out
    target = target_of(x.device)
    rounded = x.new_empty((tokens, k))
    columns = min(ROUND_TRIP_COLUMNS, triton.next_power_of_2(k))
    round_trip_kernel[(tokens, triton.cdiv(k, columns))](
        x,
        x.stride(0),
        rounded,
        k,
        COLUMNS=max(columns, QUANT_GROUP),
        EMULATE=target.emulate,
        FP8_CVT=target.fp8_cvt,
        num_warps=4,
    )
    _launch(rounded.unsqueeze(1), None, w.unsqueeze(0), sw.unsqueeze(0), out.unsqueeze(1), target)
    return out


def fp8_einsum(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out bf16 [b, h, d] of x e4m3 [b, h, r] and w e4m3 [h, d, r], packed int32 scales per 32."""
    if x.shape[0]:
        _launch(x, x_scale, w, w_scale, out, target_of(x.device))
