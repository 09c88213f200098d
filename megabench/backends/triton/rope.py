"""RoPE on adjacent pairs of the last 64 of 512 dims, forward on rows and inverse on the output."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from megabench.backends.triton.bits import bf16_to_f32, round_bf16

NOPE_PAIRS = tl.constexpr(224)
"""Pairs before the RoPE'd ones: 448 dims."""
HALF_ROPE = tl.constexpr(32)
"""cos_sin_cache row: 32 cosines, then 32 sines."""
TABLE_ROW = tl.constexpr(64)


@triton.jit
def pair_cos_sin(cos_sin_ptr, position, pair):
    """cos and sin of pair numbers `pair` (0..255) at `position` (int64); 1 and 0 for NoPE pairs."""
    rotary = pair >= NOPE_PAIRS
    column = tl.where(rotary, pair - NOPE_PAIRS, 0)
    row = cos_sin_ptr + position * TABLE_ROW
    cos = tl.load(row + column, mask=rotary, other=1.0)
    sin = tl.load(row + HALF_ROPE + column, mask=rotary, other=0.0)
    return cos, sin


@triton.jit
def rope_latent(x_ptr, cos_sin_ptr, position, EMULATE: tl.constexpr):
    """float32 [512] of a bf16 latent row, RoPE'd in float32 and not rounded back to bf16."""
    pair = tl.arange(0, 256)
    even = bf16_to_f32(tl.load(x_ptr + 2 * pair), EMULATE)
    odd = bf16_to_f32(tl.load(x_ptr + 2 * pair + 1), EMULATE)
    cos, sin = pair_cos_sin(cos_sin_ptr, position, pair)
    # NoPE dims pass untouched: x*1 - y*0 would turn some -0.0 into 0.0.
    rotary = pair >= NOPE_PAIRS
    first = tl.where(rotary, even * cos - odd * sin, even)
    second = tl.where(rotary, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(first, second), (512,))


@triton.jit
def rope_q(q, partner, cos_sin_ptr, position, dim, EMULATE: tl.constexpr):
    """float32 q [H, D] of dims `dim` [D], RoPE'd and rounded to bf16.

    `partner` holds the other element of each RoPE'd dim's pair. Dims below 448 pass untouched.
    """
    rotary = dim >= 2 * NOPE_PAIRS
    cos, sin = pair_cos_sin(cos_sin_ptr, position, dim // 2)
    turned = q * cos[None, :] + partner * tl.where(dim % 2 == 0, -sin, sin)[None, :]
    return tl.where(rotary[None, :], round_bf16(turned, EMULATE), q)


@triton.jit
def unrope(o, cos_sin_ptr, position, first_dim, H: tl.constexpr, W: tl.constexpr):
    """Inverse RoPE in float32 of output dims [first_dim, first_dim + W) of H heads."""
    first, second = tl.split(tl.reshape(o, (H, W // 2, 2)))
    cos, sin = pair_cos_sin(cos_sin_ptr, position, first_dim // 2 + tl.arange(0, W // 2))
    cos, sin = cos[None, :], sin[None, :]
    turned = tl.join(first * cos + second * sin, second * cos - first * sin)
    return tl.reshape(turned, (H, W))
