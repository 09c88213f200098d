"""Products of exactly dequantized fp8 operands: the wq_b and wo_b linears and the wo_a einsum.

Operands become bf16 in registers (exact: a code times a power of two); dots accumulate in float32.
With few tokens the weight tile is the left operand, so that the tile's long
side is the weight's and a token costs no padding beyond 16; the loop is then bound by the weight's
bytes. With many tokens the token tile is the left operand, and a weight that `prepare` dequantized
is read as bf16.
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
DEQUANTIZE_ROWS = 8
DEQUANTIZE_COLUMNS = 1024
DENSE_TOKENS = 256
"""From here a bf16 form of the weight is read instead, where `prepare` made one."""


@dataclass(frozen=True)
class MatmulTile:
    """Tokens, weight rows and reduction columns a program works on, and how it is compiled."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int
    weight_left: bool


def matmul_tile(tokens: int, groups: int, rows: int, dense: bool, target: Target) -> MatmulTile:
    """A tile for `tokens` tokens against `groups` weights of `rows` rows, dense (bf16) or e4m3."""
    if target.emulate:  # few, large steps: the interpreter pays per operation
        return MatmulTile(64, 128, 512, 1, 1, tokens <= SKINNY_TOKENS)
    if tokens <= SKINNY_TOKENS:
        wide = max(16, triton.next_power_of_2(tokens))
        few = groups * triton.cdiv(rows, 64) < 2 * target.multiprocessors
        return MatmulTile(wide, 32 if few else 64, 256, 4, 3, True)
    if dense:
        return MatmulTile(128, 256, 64, 8, 3, False)
    return MatmulTile(128, 128, 128, 8, 3, False)


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
def _plain(ptr, row, rows, row_stride, step, K, COLUMNS: tl.constexpr, EMULATE: tl.constexpr):
    """Operand [rows of `row`, COLUMNS] at columns step*COLUMNS.. of a bf16 matrix."""
    column = step * COLUMNS + tl.arange(0, COLUMNS)
    place = row.to(tl.int64)[:, None] * row_stride + column[None, :]
    mask = (row < rows)[:, None] & (column < K)[None, :]
    return bf16_operand(tl.load(ptr + place, mask=mask, other=0.0), EMULATE)


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
    W_BF16: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """out[t, g, d] = sum over r of x[t, g, r] * w[g, d, r]; a bf16 operand has no scales."""
    group = tl.program_id(1).to(tl.int64)
    d_tiles = tl.cdiv(D, BD)
    t = tl.program_id(0) // d_tiles * BT + tl.arange(0, BT)
    d = tl.program_id(0) % d_tiles * BD + tl.arange(0, BD)
    x_ptr += group * x_group_stride
    w_ptr += group * w_group_stride
    x_scale_ptr += group * x_scale_group
    w_scale_ptr += group * w_scale_group
    acc = tl.zeros((BD, BT) if WEIGHT_LEFT else (BT, BD), tl.float32)
    for step in range(0, loop_bound(tl.cdiv(K, BK), EMULATE)):
        if W_BF16:
            w = _plain(w_ptr, d, D, w_row_stride, step, K, BK, EMULATE)
        else:
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
            x = _plain(x_ptr, t, T, x_row_stride, step, K, BK, EMULATE)
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


def _scale_arguments(scale: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides from row to row, word to word and group to group of int32 [G, rows, words]."""
    return (0, 0, 0) if scale is None else (scale.stride(1), scale.stride(2), scale.stride(0))


def _launch(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    out: torch.Tensor,
    target: Target,
) -> None:
    """out [G, T, D] of x [G, T, K] and w [G, D, K], each bf16 without scales, or e4m3 with int32
    words of ue8m0 bytes [G, rows, K/128]; any strides but the last."""
    groups, tokens, k = x.shape
    rows = w.shape[1]
    tile = matmul_tile(tokens, groups, rows, w_scale is None, target)
    matmul_kernel[(triton.cdiv(tokens, tile.tokens) * triton.cdiv(rows, tile.rows), groups)](
        x if x_scale is None else x.view(torch.uint8),
        out if x_scale is None else x_scale,
        x.stride(1),
        x.stride(0),
        *_scale_arguments(x_scale),
        w if w_scale is None else w.view(torch.uint8),
        out if w_scale is None else w_scale,
        w.stride(1),
        w.stride(0),
        *_scale_arguments(w_scale),
        out,
        out.stride(1),
        out.stride(0),
        tokens,
        rows,
        k,
        BT=tile.tokens,
        BD=tile.rows,
        BK=tile.columns,
        WEIGHT_LEFT=tile.weight_left,
        X_BF16=x_scale is None,
        W_BF16=w_scale is None,
        EMULATE=target.emulate,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _row_words(scale: torch.Tensor) -> torch.Tensor:
    """int32 words [N, ceil(n/4)] of ue8m0 bytes uint8 [N, n]; a view where n is a multiple of 4."""
    bytes_ = scale.view(torch.uint8)
    if bytes_.shape[1] % 4:
        bytes_ = torch.nn.functional.pad(bytes_, (0, -bytes_.shape[1] % 4))
    return bytes_.view(torch.int32)


def linear(
    x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor, dense: torch.Tensor | None
) -> torch.Tensor:
    """bf16 [T, N] of x bf16 [T, K], quantized per token and 32 columns, and w e4m3 [N, K] with sw
    uint8 [N, K/32]; `dense` is w dequantized, if that was kept."""
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
    weight, scale = _chosen(w[None], _row_words(sw)[None], dense, tokens)
    _launch(rounded[None], None, weight, scale, out[None], target)
    return out


def fp8_einsum(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    dense: torch.Tensor | None,
) -> None:
    """out bf16 [b, h, d] of x e4m3 [b, h, r] and w e4m3 [h, d, r], packed int32 scales per 32."""
    if x.shape[0] == 0:
        return
    target = target_of(x.device)
    by_group, scale_by_group = x.transpose(0, 1), x_scale.transpose(0, 1)
    weight, scale = _chosen(w, w_scale, dense, x.shape[0])
    if scale is None:
        plain = _dequantize(by_group, scale_by_group, target)
        _launch(plain, None, weight, None, out.transpose(0, 1), target)
    else:
        _launch(by_group, scale_by_group, weight, scale, out.transpose(0, 1), target)


def _dequantize(x: torch.Tensor, x_scale: torch.Tensor, target: Target) -> torch.Tensor:
    """bf16 [G, T, K] of e4m3 [G, T, K] with packed scales: its re-use by many weight tiles costs
    less than converting it for each."""
    groups, tokens, k = x.shape
    out = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(tokens, DEQUANTIZE_ROWS), triton.cdiv(k, DEQUANTIZE_COLUMNS), groups)
    dequantize_kernel[grid](
        x.view(torch.uint8),
        x_scale,
        x.stride(1),
        x.stride(0),
        *_scale_arguments(x_scale),
        out,
        out.stride(1),
        out.stride(0),
        tokens,
        k,
        ROWS=DEQUANTIZE_ROWS,
        COLUMNS=DEQUANTIZE_COLUMNS,
        EMULATE=target.emulate,
        num_warps=4,
    )
    return out


def _chosen(
    w: torch.Tensor, scale: torch.Tensor, dense: torch.Tensor | None, tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight as stored while its bytes bound the product, else its bf16 form where kept."""
    if dense is None or tokens < DENSE_TOKENS:
        return w, scale
    return dense.view(w.shape), None
