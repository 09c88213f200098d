"""From an accumulator to the contract's output: sink, inverse RoPE, per-32 cast, layout, scales."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from megabench.backends.triton.bits import f32_to_e4m3, inverse_ue8m0, kv_scale_byte
from megabench.backends.triton.rope import unrope
from megabench.backends.triton.tiles import NEG_INF

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def normalizer(m, denom, sink_ptr, head, HAS_SINK: tl.constexpr):
    """1 / (sum + sink's term) per head, 0 where no row was valid.

    m (base-2 maximum) and denom (sum of 2^(score - m)) of the valid rows.
    """
    denominator = denom
    if HAS_SINK:
        sink = tl.load(sink_ptr + head) * LOG2_E
        denominator += tl.exp2(sink - tl.where(m == NEG_INF, 0.0, m))
    empty = denom == 0.0
    return tl.where(
        empty, 0.0, tl.div_rn(tl.zeros_like(denom) + 1.0, tl.where(empty, 1.0, denominator))
    )


@triton.jit
def natural_lse(m, denom):
    """logsumexp of the scores, natural log, +inf where no row was valid."""
    return tl.where(
        denom == 0.0, float("inf"), (m + tl.log2(tl.where(denom == 0.0, 1.0, denom))) * LN_2
    )


@triton.jit
def store_output(
    o,
    token,
    first_head,
    position,
    cos_sin_ptr,
    out_ptr,
    sf_ptr,
    sf_stride_group,
    sf_stride_word,
    n_wv_group,
    first_dim,
    H: tl.constexpr,
    W: tl.constexpr,
    FP8_CVT: tl.constexpr,
):
    """Un-rope, cast and store normalized output o [H, W] of heads first_head.. and dims
    [first_dim, first_dim + W). Element (h, c, j) of a group of 8 heads goes to (c*8 + h)*32 + j;
    the scales of four heads share a word, MN-major.
    """
    C: tl.constexpr = W // 32
    if first_dim + W > 448:
        o = unrope(o, cos_sin_ptr, position, first_dim, H, W)
    o += 0.0  # no -0.0: a token without a valid row is all zero bytes
    blocks = tl.reshape(o, (H, C, 32))
    byte = kv_scale_byte(tl.max(tl.abs(blocks), axis=2))
    code = f32_to_e4m3(blocks * inverse_ue8m0(byte)[:, :, None], FP8_CVT)

    head = first_head + tl.arange(0, H)
    chunk = first_dim // 32 + tl.arange(0, C)
    place = (head // 8)[:, None] * 4096 + (chunk[None, :] * 8 + (head % 8)[:, None]) * 32
    row = out_ptr + token * n_wv_group * 4096
    tl.store(row + place[:, :, None] + tl.arange(0, 32)[None, None, :], code)

    shift = (tl.arange(0, 4) * 8)[None, :, None]
    words = tl.sum(tl.reshape(byte, (H // 4, 4, C)) << shift, axis=1)
    quad = first_head // 4 + tl.arange(0, H // 4)
    word = (quad // 2)[:, None].to(tl.int64) * sf_stride_group
    word += (chunk[None, :] * 2 + (quad % 2)[:, None]) * sf_stride_word
    tl.store(sf_ptr + token + word, words)
