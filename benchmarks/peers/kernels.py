"""What a pipeline that is not fused launches around the attention: Q RoPE before, the cast after.

Both move no more than they must: 8 KB of a token's 64 KB of Q, and one read of the bf16 output for
one write of codes and scales.
"""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from megabench.backends.triton.bits import bf16_to_f32, f32_to_bf16
from megabench.backends.triton.epilogue import store_output
from megabench.backends.triton.target import target_of
from megabench.formats import WV_GROUP_SIZE
from megabench.quant import QuantizedActivation

ROPE_HEADS = 16
CAST_HEADS = 8
WARPS = 4


@triton.jit
def rope_kernel(
    q_ptr, out_ptr, position_ptr, cos_sin_ptr, HEADS, H: tl.constexpr, EMULATE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    place = (token * HEADS + head)[:, None] * 512 + 448 + tl.arange(0, 64)[None, :]
    q = bf16_to_f32(tl.load(q_ptr + place), EMULATE)
    row = cos_sin_ptr + tl.load(position_ptr + token).to(tl.int64) * 64
    pair = tl.arange(0, 32)
    cos, sin = tl.load(row + pair)[None, :], tl.load(row + 32 + pair)[None, :]
    even, odd = tl.split(tl.reshape(q, (H, 32, 2)))
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    tl.store(out_ptr + place, f32_to_bf16(tl.reshape(turned, (H, 64)), EMULATE))


@triton.jit
def cast_kernel(
    o_ptr,
    position_ptr,
    cos_sin_ptr,
    out_ptr,
    sf_ptr,
    sf_stride_group,
    sf_stride_word,
    HEADS,
    GROUPS,
    H: tl.constexpr,
    EMULATE: tl.constexpr,
    FP8_CVT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * H
    place = (token * HEADS + first + tl.arange(0, H))[:, None] * 512 + tl.arange(0, 512)[None, :]
    store_output(
        bf16_to_f32(tl.load(o_ptr + place), EMULATE),
        token,
        first,
        tl.load(position_ptr + token).to(tl.int64),
        cos_sin_ptr,
        out_ptr,
        sf_ptr,
        sf_stride_group,
        sf_stride_word,
        GROUPS,
        0,
        H,
        512,
        FP8_CVT,
    )


def rope_queries(
    q: torch.Tensor, out: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> None:
    """RoPE the last 64 dims of q bf16 [T, H, 512] (natural order) into those of `out`, which may be
    q; the other dims are neither read nor written. positions int [T], cos_sin_cache fp32 [P, 64].
    """
    tokens, heads, _ = q.shape
    rope_kernel[(tokens, heads // ROPE_HEADS)](
        q,
        out,
        positions,
        cos_sin_cache,
        heads,
        H=ROPE_HEADS,
        EMULATE=target_of(q.device).emulate,
        num_warps=WARPS,
    )


def cast_output(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    out: QuantizedActivation,
) -> None:
    """Inverse RoPE and per-32 FP8 cast of o bf16 [T, H, 512] into the layout wo_a reads."""
    tokens, heads, _ = o.shape
    target = target_of(o.device)
    cast_kernel[(tokens, heads // CAST_HEADS)](
        o,
        positions,
        cos_sin_cache,
        out.data.view(torch.uint8),
        out.scale,
        out.scale.stride(1),
        out.scale.stride(2),
        heads,
        heads // WV_GROUP_SIZE,
        H=CAST_HEADS,
        EMULATE=target.emulate,
        FP8_CVT=target.fp8_cvt,
        num_warps=WARPS,
    )
