"""K tiles as bf16 dot operands, and the online-softmax step over one of them.

A cached record dequantizes to bf16 exactly: a code and a power of two, or a code and an e4m3 scale,
need at most 6 significant bits. The tile is K and V at once.

On a GPU four codes become bf16 in one block of PTX: bits shifted into place read 2^-120 (e4m3) or
2^-126 (e2m1) of the value, a multiplication restores it, another applies the scale. Both are
`fma.rn.bf16x2` with -0.0, which SM80 has and which rounds nothing here. No code becomes a NaN, so a
row that no valid index names contributes exactly 0 once its scale is 0, whatever its bytes are.
"""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from megabench.backends.triton.bits import (
    dot,
    dot_operand,
    e2m1_to_f32,
    e4m3_to_f32,
    ue8m0_to_f32,
)

NEG_INF = tl.constexpr(float("-inf"))

_E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, d, bias, zero;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 a, a, 0x80008000;
    and.b32 b, b, 0x80008000;
    lop3.b32 c, c, 0x07f007f0, a, 0xEA;
    lop3.b32 d, d, 0x07f007f0, b, 0xEA;
    mov.b32 bias, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 c, c, bias, zero;
    fma.rn.bf16x2 d, d, bias, zero;
    fma.rn.bf16x2 $0, c, $3, zero;
    fma.rn.bf16x2 $1, d, $4, zero;
}""")

_E2M1_TO_BF16 = tl.constexpr("""{
    .reg .b32 x, y, s, t, u, v, bias, zero;
    mov.b32 bias, 0x7E807E80;
    mov.b32 zero, 0x80008000;
    prmt.b32 x, $4, 0, 0x4140;
    prmt.b32 y, $4, 0, 0x4342;
    shl.b32 s, x, 12;
    shl.b32 t, y, 12;
    and.b32 s, s, 0x80008000;
    and.b32 t, t, 0x80008000;
    shl.b32 u, x, 6;
    shl.b32 v, y, 6;
    lop3.b32 u, u, 0x01C001C0, s, 0xEA;
    lop3.b32 v, v, 0x01C001C0, t, 0xEA;
    fma.rn.bf16x2 u, u, bias, zero;
    fma.rn.bf16x2 v, v, bias, zero;
    fma.rn.bf16x2 $0, u, $5, zero;
    fma.rn.bf16x2 $1, v, $6, zero;
    shl.b32 s, x, 8;
    shl.b32 t, y, 8;
    and.b32 s, s, 0x80008000;
    and.b32 t, t, 0x80008000;
    shl.b32 u, x, 2;
    shl.b32 v, y, 2;
    lop3.b32 u, u, 0x01C001C0, s, 0xEA;
    lop3.b32 v, v, 0x01C001C0, t, 0xEA;
    fma.rn.bf16x2 u, u, bias, zero;
    fma.rn.bf16x2 v, v, bias, zero;
    fma.rn.bf16x2 $2, u, $5, zero;
    fma.rn.bf16x2 $3, v, $6, zero;
}""")


@triton.jit
def e4m3_times(code, scale):
    """bf16 code * scale, for uint8 e4m3 codes and bf16 scales of one shape; GPU only."""
    return tl.inline_asm_elementwise(
        _E4M3_TO_BF16, "=r,=r,r,r,r", [code, scale], dtype=tl.bfloat16, is_pure=True, pack=4
    )


@triton.jit
def e2m1_times(pair, scale):
    """bf16 (low nibble * scale, high nibble * scale) of uint8 pairs; GPU only."""
    return tl.inline_asm_elementwise(
        _E2M1_TO_BF16,
        "=r,=r,=r,=r,r,r,r",
        [pair, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def ue8m0_to_bf16(byte):
    """bf16 2^(byte - 127) of uint8 bytes 1..254; 0 reads 0."""
    return (byte.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def spread(scale, N: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """Repeat each of GROUPS scales a row EACH times: [N, GROUPS * EACH]."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (N, GROUPS, EACH)), (N, GROUPS * EACH))


@triton.jit
def mxfp8_tile(cache_ptr, data, scale, valid, N: tl.constexpr, EMULATE: tl.constexpr):
    """K tile [N, 512] of 528-byte records at byte offsets `data` and `scale`."""
    code = tl.load(cache_ptr + data[:, None] + tl.arange(0, 512)[None, :])
    byte = tl.load(cache_ptr + scale[:, None] + tl.arange(0, 16)[None, :])
    byte = tl.where(valid[:, None], byte, 0)
    if EMULATE:
        return e4m3_to_f32(code) * spread(ue8m0_to_f32(byte.to(tl.int32)), N, 16, 32)
    else:
        return e4m3_times(code, spread(ue8m0_to_bf16(byte), N, 16, 32))


@triton.jit
def nvfp4_tile(cache_ptr, data, scale, valid, N: tl.constexpr, EMULATE: tl.constexpr):
    """K tile [N, 512] of 288-byte records at byte offsets `data` and `scale`."""
    pair = tl.load(cache_ptr + data[:, None] + tl.arange(0, 256)[None, :])
    code = tl.load(cache_ptr + scale[:, None] + tl.arange(0, 32)[None, :])
    scales = e4m3_to_f32(tl.where(valid[:, None], code, 0))
    if EMULATE:
        wide = spread(scales, N, 32, 8)
        nibbles = pair.to(tl.int32)
        low, high = e2m1_to_f32(nibbles & 15) * wide, e2m1_to_f32(nibbles >> 4) * wide
    else:
        low, high = e2m1_times(pair, spread(scales.to(tl.bfloat16), N, 32, 8))
    return tl.reshape(tl.join(low, high), (N, 512))


@triton.jit
def softmax_weights(s, valid, m, denom):
    """One online-softmax step in base 2 over scores s [H, N].

    Returns the new maximum (-inf until a valid row came), the new sum, the weights [H, N] and the
    factor for what was accumulated before.
    """
    s = tl.where(valid[None, :], s, NEG_INF)
    m_new = tl.maximum(m, tl.max(s, axis=1))
    reference = tl.where(m_new == NEG_INF, 0.0, m_new)
    decay = tl.exp2(m - reference)
    p = tl.exp2(s - reference[:, None])
    return m_new, denom * decay + tl.sum(p, axis=1), p, decay


@triton.jit
def attend_tile(q, k, valid, some, scale, m, denom, acc, EMULATE: tl.constexpr):
    """Attention of q [H, 512] over the tile k [N, 512], which is K and V."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale[:, None]
    p = tl.zeros_like(s)
    decay = tl.zeros_like(m) + 1.0
    if some:
        m, denom, p, decay = softmax_weights(s, valid, m, denom)
    return m, denom, dot(dot_operand(p, EMULATE), k, acc * decay[:, None], EMULATE)
