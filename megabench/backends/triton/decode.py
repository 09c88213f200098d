"""Fused decode: Q RoPE, attention over paged quantized records, inverse RoPE, cast.

One program serves a token, a tile of heads and a share of the rows. Its K tile is dequantized to
bf16 in registers and is V too. With one share a program finishes its token; with more it writes
float32 partials that `combine.py` finishes, so that a few tokens fill the device.
"""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from megabench.backends.triton.bits import loop_bound
from megabench.backends.triton.epilogue import natural_lse, normalizer, store_output
from megabench.backends.triton.pages import row_offsets, slots_of
from megabench.backends.triton.query import load_query, score_scale
from megabench.backends.triton.tiles import NEG_INF, attend_tile, mxfp8_tile, nvfp4_tile


@triton.jit
def _row_count(len_ptr, token, topk, HAS_LEN: tl.constexpr):
    if HAS_LEN:
        return tl.maximum(tl.minimum(tl.load(len_ptr + token), topk), 0)
    else:
        return topk


@triton.jit(do_not_specialize=["topk", "rounds", "extra_topk", "pool", "extra_pool"])
def decode_kernel(
    q_ptr,
    q_stride,
    kv_ptr,
    page_stride,
    pool,
    index_ptr,
    index_stride,
    len_ptr,
    topk,
    extra_ptr,
    extra_page_stride,
    extra_pool,
    extra_index_ptr,
    extra_index_stride,
    extra_len_ptr,
    extra_topk,
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
    lse_ptr,
    partial_ptr,
    partial_ml_ptr,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE: tl.constexpr,
    DATA_PITCH: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_PITCH: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    EXTRA_FP4: tl.constexpr,
    EXTRA_PAGE: tl.constexpr,
    EXTRA_DATA_PITCH: tl.constexpr,
    EXTRA_SCALE_BASE: tl.constexpr,
    EXTRA_SCALE_PITCH: tl.constexpr,
    HAS_LEN: tl.constexpr,
    HAS_EXTRA_LEN: tl.constexpr,
    HAS_SINK: tl.constexpr,
    Q_NORM: tl.constexpr,
    EMULATE: tl.constexpr,
    FP8_CVT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) // SPLITS * H
    head = first_head + tl.arange(0, H)
    position = tl.load(position_ptr + token).to(tl.int64)
    count = _row_count(len_ptr, token, topk, HAS_LEN)
    index_row = index_ptr + token * index_stride
    tiles = tl.cdiv(count, N)
    total = tiles
    if HAS_EXTRA:
        extra_count = _row_count(extra_len_ptr, token, extra_topk, HAS_EXTRA_LEN)
        extra_row = extra_index_ptr + token * extra_index_stride
        total += tl.cdiv(extra_count, N)
    # This share's tiles of the two lists, one after the other.
    share = tl.cdiv(total, SPLITS)
    first = tl.program_id(1) % SPLITS * share
    last = tl.minimum(first + share, total)
    end = tl.minimum(last, tiles)
    extra_first, extra_end = tl.maximum(first - tiles, 0), last - tiles
    q, squares = load_query(
        q_ptr + token * q_stride, first_head, position, cos_sin_ptr, HEADS, 0, H, 512, EMULATE
    )
    scale = score_scale(squares, sm_scale_log2, eps, Q_NORM)
    m = tl.full((H,), NEG_INF, tl.float32)
    denom = tl.zeros((H,), tl.float32)
    acc = tl.zeros((H, 512), tl.float32)
    # One round. A loop-carried q is what Triton keeps in shared memory as the left operand; one
    # computed in place it would reload into registers for every tile.
    for _ in range(0, loop_bound(rounds, EMULATE)):
        for tile in range(loop_bound(first, EMULATE), loop_bound(end, EMULATE)):
            slot, valid = slots_of(index_row, tile * N, count, pool, N)
            data, sf = row_offsets(slot, page_stride, PAGE, DATA_PITCH, SCALE_BASE, SCALE_PITCH)
            k = mxfp8_tile(kv_ptr, data, sf, valid, N, EMULATE)
            some = tile * N < count
            m, denom, acc = attend_tile(q, k, valid, some, scale, m, denom, acc, EMULATE)
        if HAS_EXTRA:
            for tile in range(loop_bound(extra_first, EMULATE), loop_bound(extra_end, EMULATE)):
                slot, valid = slots_of(extra_row, tile * N, extra_count, extra_pool, N)
                data, sf = row_offsets(
                    slot,
                    extra_page_stride,
                    EXTRA_PAGE,
                    EXTRA_DATA_PITCH,
                    EXTRA_SCALE_BASE,
                    EXTRA_SCALE_PITCH,
                )
                if EXTRA_FP4:
                    k = nvfp4_tile(extra_ptr, data, sf, valid, N, EMULATE)
                else:
                    k = mxfp8_tile(extra_ptr, data, sf, valid, N, EMULATE)
                some = tile * N < extra_count
                m, denom, acc = attend_tile(q, k, valid, some, scale, m, denom, acc, EMULATE)
        q = tl.zeros_like(q)

    if SPLITS == 1:
        o = acc * normalizer(m, denom, sink_ptr, head, HAS_SINK)[:, None]
        store_output(
            o,
            token,
            first_head,
            position,
            cos_sin_ptr,
            out_ptr,
            sf_ptr,
            sf_stride_group,
            sf_stride_word,
            HEADS // 8,
            0,
            H,
            512,
            FP8_CVT,
        )
        tl.store(lse_ptr + token * HEADS + head, natural_lse(m, denom))
    else:
        part = (token * SPLITS + tl.program_id(1) % SPLITS) * HEADS + head
        tl.store(partial_ptr + part[:, None] * 512 + tl.arange(0, 512)[None, :], acc)
        tl.store(partial_ml_ptr + part * 2, m)
        tl.store(partial_ml_ptr + part * 2 + 1, denom)
