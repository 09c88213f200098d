"""Fused prefill: the decode's computation over rows already gathered to bf16.

One program serves a token and a tile of heads. Head dims are two halves with an accumulator each,
so that a row's halves load, multiply and accumulate on their own.
"""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from megabench.backends.triton.bits import bf16_operand, dot, dot_operand, loop_bound
from megabench.backends.triton.epilogue import LN_2, natural_lse, normalizer, store_output
from megabench.backends.triton.query import load_query, score_scale
from megabench.backends.triton.tiles import NEG_INF, softmax_weights


@triton.jit(do_not_specialize=["s_kv", "topk", "rounds"])
def prefill_kernel(
    q_ptr,
    q_stride,
    kv_ptr,
    kv_stride,
    s_kv,
    index_ptr,
    index_stride,
    len_ptr,
    topk,
    rounds,
    sink_ptr,
    position_ptr,
    cos_sin_ptr,
    sm_scale_log2,
    eps,
    out_ptr,
    sf_ptr,
    sf_stride_group,
    sf_stride_word,
    max_ptr,
    lse_ptr,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    HAS_LEN: tl.constexpr,
    HAS_SINK: tl.constexpr,
    Q_NORM: tl.constexpr,
    EMULATE: tl.constexpr,
    FP8_CVT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * H
    head = first_head + tl.arange(0, H)
    position = tl.load(position_ptr + token).to(tl.int64)
    q_row = q_ptr + token * q_stride
    q0, squares0 = load_query(q_row, first_head, position, cos_sin_ptr, HEADS, 0, H, 256, EMULATE)
    q1, squares1 = load_query(q_row, first_head, position, cos_sin_ptr, HEADS, 256, H, 256, EMULATE)
    scale = score_scale(squares0 + squares1, sm_scale_log2, eps, Q_NORM)

    count = topk
    if HAS_LEN:
        count = tl.maximum(tl.minimum(tl.load(len_ptr + token), topk), 0)
    m = tl.full((H,), NEG_INF, tl.float32)
    denom = tl.zeros((H,), tl.float32)
    acc0 = tl.zeros((H, 256), tl.float32)
    acc1 = tl.zeros((H, 256), tl.float32)
    half = tl.arange(0, 256)[None, :]
    index_row = index_ptr + token * index_stride
    for _ in range(0, loop_bound(rounds, EMULATE)):
        for first in range(0, loop_bound(count, EMULATE), N):
            column = first + tl.arange(0, N)
            row = tl.load(index_row + column, mask=column < count, other=-1)
            valid = (row >= 0) & (row < s_kv)
            # A masked row reads 0: whatever a slot without an index holds must not reach 0 * V.
            rows = kv_ptr + (tl.where(valid, row, 0).to(tl.int64) * kv_stride)[:, None]
            k0 = bf16_operand(tl.load(rows + half, mask=valid[:, None], other=0.0), EMULATE)
            k1 = bf16_operand(tl.load(rows + 256 + half, mask=valid[:, None], other=0.0), EMULATE)
            # Scaled apart: an added pair of dots would be fused into a chained one.
            s0 = tl.dot(q0, tl.trans(k0), input_precision="ieee") * scale[:, None]
            s1 = tl.dot(q1, tl.trans(k1), input_precision="ieee") * scale[:, None]
            s = s0 + s1
            p = tl.zeros_like(s)
            decay = tl.zeros_like(m) + 1.0
            if first < count:
                m, denom, p, decay = softmax_weights(s, valid, m, denom)
            weights = dot_operand(p, EMULATE)
            acc0 = dot(weights, k0, acc0 * decay[:, None], EMULATE)
            acc1 = dot(weights, k1, acc1 * decay[:, None], EMULATE)
        q0, q1 = tl.zeros_like(q0), tl.zeros_like(q1)

    norm = normalizer(m, denom, sink_ptr, head, HAS_SINK)[:, None]
    G: tl.constexpr = HEADS // 8
    store_output(
        acc0 * norm,
        token,
        first_head,
        position,
        cos_sin_ptr,
        out_ptr,
        sf_ptr,
        sf_stride_group,
        sf_stride_word,
        G,
        0,
        H,
        256,
        FP8_CVT,
    )
    store_output(
        acc1 * norm,
        token,
        first_head,
        position,
        cos_sin_ptr,
        out_ptr,
        sf_ptr,
        sf_stride_group,
        sf_stride_word,
        G,
        256,
        H,
        256,
        FP8_CVT,
    )
    tl.store(max_ptr + token * HEADS + head, m * LN_2)
    tl.store(lse_ptr + token * HEADS + head, natural_lse(m, denom))
