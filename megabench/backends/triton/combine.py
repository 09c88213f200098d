"""Finish a split decode: merge the shares' partials, then the same epilogue as an unsplit one."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from megabench.backends.triton.epilogue import natural_lse, normalizer, store_output
from megabench.backends.triton.tiles import NEG_INF

COMBINE_HEADS = 8
"""Heads a program finishes: one wo_a group."""
COMBINE_DIMS = 128
"""Dims a program finishes."""
COMBINE_WARPS = 4


@triton.jit
def combine_kernel(
    partial_ptr,
    partial_ml_ptr,
    sink_ptr,
    position_ptr,
    cos_sin_ptr,
    out_ptr,
    sf_ptr,
    sf_stride_group,
    sf_stride_word,
    lse_ptr,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    FP8_CVT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * H
    first_dim = tl.program_id(2) * W
    head = first_head + tl.arange(0, H)
    dim = first_dim + tl.arange(0, W)
    part = token * SPLITS * HEADS + head

    m = tl.full((H,), NEG_INF, tl.float32)
    for split in tl.static_range(SPLITS):
        m = tl.maximum(m, tl.load(partial_ml_ptr + (part + split * HEADS) * 2))
    reference = tl.where(m == NEG_INF, 0.0, m)
    denom = tl.zeros((H,), tl.float32)
    acc = tl.zeros((H, W), tl.float32)
    for split in tl.static_range(SPLITS):
        share = part + split * HEADS
        weight = tl.exp2(tl.load(partial_ml_ptr + share * 2) - reference)
        denom += weight * tl.load(partial_ml_ptr + share * 2 + 1)
        o = tl.load(partial_ptr + share[:, None] * 512 + dim[None, :])
        acc += weight[:, None] * o

    position = tl.load(position_ptr + token).to(tl.int64)
    store_output(
        acc * normalizer(m, denom, sink_ptr, head, HAS_SINK)[:, None],
        token,
        first_head,
        position,
        cos_sin_ptr,
        out_ptr,
        sf_ptr,
        sf_stride_group,
        sf_stride_word,
        HEADS // 8,
        first_dim,
        H,
        W,
        FP8_CVT,
    )
    if first_dim == 0:
        tl.store(lse_ptr + token * HEADS + head, natural_lse(m, denom))
