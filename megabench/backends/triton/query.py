"""A token's Q as a dot operand: the chunked layout, RoPE, and the optional norm."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from megabench.backends.triton.bits import bf16_to_f32, dot_operand
from megabench.backends.triton.rope import rope_q


@triton.jit
def load_query(
    q_row,
    first_head,
    position,
    cos_sin_ptr,
    HEADS: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """RoPE'd q [H, W] of dims [FIRST_DIM, FIRST_DIM + W) and the sum of squares before RoPE [H].

    The token's memory is 32 chunks of [HEADS, 16].
    """
    head = first_head + tl.arange(0, H)
    dim = FIRST_DIM + tl.arange(0, W)
    place = head[:, None] * 16 + ((dim // 16) * (HEADS * 16) + dim % 16)[None, :]
    q = bf16_to_f32(tl.load(q_row + place), EMULATE)
    squares = tl.sum(q * q, axis=1)
    if FIRST_DIM + W > 448:
        other = dim ^ 1
        place = head[:, None] * 16 + ((other // 16) * (HEADS * 16) + other % 16)[None, :]
        rotary = (dim >= 448)[None, :] & (head >= 0)[:, None]
        partner = bf16_to_f32(tl.load(q_row + place, mask=rotary, other=0.0), EMULATE)
        q = rope_q(q, partner, cos_sin_ptr, position, dim, EMULATE)
    return dot_operand(q, EMULATE), squares


@triton.jit
def score_scale(squares, sm_scale_log2, eps, Q_NORM: tl.constexpr):
    """Per-head factor from q . K to a base-2 score: rsqrt(mean(q^2) + eps) when Q is normed."""
    if Q_NORM:
        return sm_scale_log2 * tl.rsqrt(squares * (1.0 / 512.0) + eps)
    else:
        return tl.zeros_like(squares) + sm_scale_log2
