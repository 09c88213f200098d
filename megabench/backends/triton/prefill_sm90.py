"""Fused prefill for SM90 in Gluon: three warp-specialized roles instead of serial phases.

A program serves a token and 64 heads; K tiles of 64 rows go through two buffers.

    producer   4 warps  gathers tile b+2 with 16-byte async copies while b and b+1 are in use
    scores     4 warps  S = Q K^T, online softmax, O[:, :256] += P V[:, :256] (P in registers)
    values     4 warps  O[:, 256:] += P V[:, 256:] (P through shared memory)

Barriers: a tile is `full` (all its copies landed) and `free` (both consumers are done with it);
`p_full` hands P and the factor for what was accumulated before to `values`, `p_free` hands the
buffer back; `done` hands over the final 1 / sum. Shared memory: Q 64 KB, K 2 x 64 KB, P 8 KB.
"""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEADS_PER_PROGRAM = 64
ROWS = gl.constexpr(64)
BUFFERS = gl.constexpr(2)
WARPS = 4
"""Warps of a role."""
PRODUCER_THREADS = gl.constexpr(128)
VALUES_REGISTERS = gl.constexpr(168)
PRODUCER_REGISTERS = gl.constexpr(88)
REGISTERS_AT_LAUNCH = 168
"""Three roles of 128 threads share 64 K registers; `scores` takes what the others leave."""

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
TILE_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _load_query(q_row, q_smem, first_head, position, cos_sin_ptr, HEADS: gl.constexpr):
    """Q [64, 512] into shared memory, its last 64 dims RoPE'd in float32."""
    head = first_head + gl.arange(0, 64, gl.SliceLayout(1, QUERY))
    column = gl.arange(0, 64, gl.SliceLayout(0, QUERY))
    for c in gl.static_range(8):
        dim = c * 64 + column
        place = head[:, None] * 16 + ((dim // 16) * (HEADS * 16) + dim % 16)[None, :]
        q = gl.load(q_row + place)
        if c == 7:
            first, second = gl.split(gl.reshape(q.to(gl.float32), (64, 32, 2)))
            pair = gl.arange(0, 32, gl.SliceLayout(0, first.type.layout))
            cos = gl.load(cos_sin_ptr + position * 64 + pair)[None, :]
            sin = gl.load(cos_sin_ptr + position * 64 + 32 + pair)[None, :]
            turned = gl.join(first * cos - second * sin, second * cos + first * sin)
            q = gl.reshape(turned, (64, 64)).to(gl.bfloat16)
        q_smem.slice(c * 64, 64, dim=1).store(q)


@gluon.jit
def _producer(kv_ptr, kv_stride, s_kv, index_row, count, k_smem, full, free):
    row = gl.arange(0, ROWS, gl.SliceLayout(1, GATHER))
    dim = gl.arange(0, 512, gl.SliceLayout(0, GATHER))
    for b in range((count + ROWS - 1) // ROWS):
        entry = gl.load(index_row + b * ROWS + row, mask=b * ROWS + row < count, other=-1)
        valid = (entry >= 0) & (entry < s_kv)
        rows = kv_ptr + gl.where(valid, entry, 0).to(gl.int64) * kv_stride
        mbarrier.wait(free.index(b % BUFFERS), ((b // BUFFERS) & 1) ^ 1)
        # A masked row is filled with zeros: nothing it held may reach 0 * V.
        async_copy.async_copy_global_to_shared(
            k_smem.index(b % BUFFERS), rows[:, None] + dim[None, :], mask=valid[:, None]
        )
        async_copy.mbarrier_arrive(full.index(b % BUFFERS), increment_count=False)


@gluon.jit
def _store_half(
    acc,
    token,
    first_head,
    position,
    cos_sin_ptr,
    out_ptr,
    sf_ptr,
    sf_stride_group,
    sf_stride_word,
    HEADS: gl.constexpr,
    FIRST_DIM: gl.constexpr,
):
    """Un-rope, cast and store normalized output [64, 256] from FIRST_DIM on: see epilogue.py."""
    if FIRST_DIM == 256:
        first, second = gl.split(gl.reshape(acc, (64, 128, 2)))
        pair = gl.arange(0, 128, gl.SliceLayout(0, first.type.layout))
        rotary = pair >= 96
        column = gl.where(rotary, pair - 96, 0)
        cos = gl.load(cos_sin_ptr + position * 64 + column, mask=rotary, other=1.0)[None, :]
        sin = gl.load(cos_sin_ptr + position * 64 + 32 + column, mask=rotary, other=0.0)[None, :]
        turned = gl.join(first * cos + second * sin, second * cos - first * sin)
        acc = gl.reshape(turned, (64, 256))
    blocks = gl.reshape(acc + 0.0, (64, 8, 32))
    amax = gl.maximum(gl.max(gl.abs(blocks), 2), 1e-4)
    bits = amax.to(gl.int32, bitcast=True)
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    inverse = ((254 - byte) << 23).to(gl.float32, bitcast=True)
    code = (blocks * gl.expand_dims(inverse, 2)).to(gl.float8e4nv).to(gl.uint8, bitcast=True)

    L3: gl.constexpr = code.type.layout
    head = first_head + gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, L3)))
    chunk = FIRST_DIM // 32 + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    j = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(0, L3)))
    place = (head // 8)[:, None] * 4096 + (chunk[None, :] * 8 + (head % 8)[:, None]) * 32
    row = out_ptr + token * (HEADS // 8) * 4096
    offsets = gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(j, 0), 0)
    gl.store(row + offsets, code)

    # Byte h % 4 of word (c * 8 + h % 8) // 4, MN-major.
    sf = sf_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
    word = (head // 8)[:, None].to(gl.int64) * sf_stride_group
    word += (chunk[None, :] * 2 + ((head % 8) // 4)[:, None]) * sf_stride_word
    gl.store(sf + (token + word) * 4 + (head % 4)[:, None], byte.to(gl.uint8))


@gluon.jit
def _scores(
    s_kv,
    index_row,
    count,
    scale,
    sink_ptr,
    token,
    first_head,
    position,
    cos_sin_ptr,
    out_ptr,
    sf_ptr,
    sf_stride_group,
    sf_stride_word,
    max_ptr,
    lse_ptr,
    q_smem,
    k_smem,
    p_smem,
    decay_smem,
    norm_smem,
    full,
    free,
    p_full,
    p_free,
    done,
    HEADS: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    acc = gl.zeros([64, 256], gl.float32, OUT)
    m = gl.full([64], float("-inf"), gl.float32, ROW)
    total = gl.full([64], 0.0, gl.float32, ROW)
    column = gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    for b in range((count + ROWS - 1) // ROWS):
        entry = gl.load(index_row + b * ROWS + column, mask=b * ROWS + column < count, other=-1)
        valid = (entry >= 0) & (entry < s_kv)
        k = k_smem.index(b % BUFFERS)
        mbarrier.wait(full.index(b % BUFFERS), (b // BUFFERS) & 1)
        fence_async_shared()
        zero = gl.zeros([64, ROWS], gl.float32, SCORES)
        s = warpgroup_mma(q_smem, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where(valid[None, :], s * scale, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1))
        reference = gl.where(m_new == float("-inf"), 0.0, m_new)
        decay = gl.exp2(m - reference)
        p = gl.exp2(s - reference[:, None])
        total = total * decay + gl.sum(p, 1)
        m = m_new
        weights = p.to(gl.bfloat16)
        mbarrier.wait(p_free, (b & 1) ^ 1)
        p_smem.store(weights)
        decay_smem.store(decay)
        fence_async_shared()
        mbarrier.arrive(p_full, count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
        acc = warpgroup_mma(
            gl.convert_layout(weights, P_OPERAND), k.slice(0, 256, dim=1), acc, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(b % BUFFERS), count=1)

    head = first_head + gl.arange(0, 64, ROW)
    empty = total == 0.0
    denominator = total
    if HAS_SINK:
        sink = gl.load(sink_ptr + head) * LOG2_E
        denominator += gl.exp2(sink - gl.where(m == float("-inf"), 0.0, m))
    norm = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, denominator))
    norm_smem.store(norm)
    mbarrier.arrive(done, count=1)
    lse = (m + gl.log2(gl.where(empty, 1.0, total))) * LN_2
    gl.store(lse_ptr + token * HEADS + head, gl.where(empty, float("inf"), lse))
    gl.store(max_ptr + token * HEADS + head, m * LN_2)
    _store_half(
        acc * gl.convert_layout(norm, gl.SliceLayout(1, OUT))[:, None],
        token,
        first_head,
        position,
        cos_sin_ptr,
        out_ptr,
        sf_ptr,
        sf_stride_group,
        sf_stride_word,
        HEADS,
        0,
    )


@gluon.jit
def _values(
    count,
    token,
    first_head,
    position,
    cos_sin_ptr,
    out_ptr,
    sf_ptr,
    sf_stride_group,
    sf_stride_word,
    k_smem,
    p_smem,
    decay_smem,
    norm_smem,
    free,
    p_full,
    p_free,
    done,
    HEADS: gl.constexpr,
):
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    acc = gl.zeros([64, 256], gl.float32, OUT)
    for b in range((count + ROWS - 1) // ROWS):
        mbarrier.wait(p_full, b & 1)
        acc = acc * decay_smem.load(ROW)[:, None]
        k = k_smem.index(b % BUFFERS)
        acc = warpgroup_mma(p_smem, k.slice(256, 256, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(b % BUFFERS), count=1)
        mbarrier.arrive(p_free, count=1)
    mbarrier.wait(done, 0)
    _store_half(
        acc * norm_smem.load(ROW)[:, None],
        token,
        first_head,
        position,
        cos_sin_ptr,
        out_ptr,
        sf_ptr,
        sf_stride_group,
        sf_stride_word,
        HEADS,
        256,
    )


@gluon.jit(do_not_specialize=["s_kv", "topk"])
def prefill_sm90_kernel(
    q_ptr,
    q_stride,
    kv_ptr,
    kv_stride,
    s_kv,
    index_ptr,
    index_stride,
    len_ptr,
    topk,
    sink_ptr,
    position_ptr,
    cos_sin_ptr,
    sm_scale_log2,
    out_ptr,
    sf_ptr,
    sf_stride_group,
    sf_stride_word,
    max_ptr,
    lse_ptr,
    HEADS: gl.constexpr,
    HAS_LEN: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    token = gl.program_id(0).to(gl.int64)
    first_head = gl.program_id(1) * 64
    position = gl.load(position_ptr + token).to(gl.int64)
    index_row = index_ptr + token * index_stride
    count = topk
    if HAS_LEN:
        count = gl.maximum(gl.minimum(gl.load(len_ptr + token), topk), 0)

    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 512], TILE_SHARED)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, ROWS, 512], TILE_SHARED)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [64, ROWS], TILE_SHARED)
    decay_smem = gl.allocate_shared_memory(gl.float32, [64], VECTOR_SHARED)
    norm_smem = gl.allocate_shared_memory(gl.float32, [64], VECTOR_SHARED)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=PRODUCER_THREADS)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_free, count=1)
    mbarrier.init(done, count=1)
    _load_query(q_ptr + token * q_stride, q_smem, first_head, position, cos_sin_ptr, HEADS)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                _scores,
                (
                    s_kv,
                    index_row,
                    count,
                    sm_scale_log2,
                    sink_ptr,
                    token,
                    first_head,
                    position,
                    cos_sin_ptr,
                    out_ptr,
                    sf_ptr,
                    sf_stride_group,
                    sf_stride_word,
                    max_ptr,
                    lse_ptr,
                    q_smem,
                    k_smem,
                    p_smem,
                    decay_smem,
                    norm_smem,
                    full,
                    free,
                    p_full,
                    p_free,
                    done,
                    HEADS,
                    HAS_SINK,
                ),
            ),
            (
                _values,
                (
                    count,
                    token,
                    first_head,
                    position,
                    cos_sin_ptr,
                    out_ptr,
                    sf_ptr,
                    sf_stride_group,
                    sf_stride_word,
                    k_smem,
                    p_smem,
                    decay_smem,
                    norm_smem,
                    free,
                    p_full,
                    p_free,
                    done,
                    HEADS,
                ),
            ),
            (
                _producer,
                (kv_ptr, kv_stride, s_kv, index_row, count, k_smem, full, free),
            ),
        ],
        [4, 4],
        [VALUES_REGISTERS, PRODUCER_REGISTERS],
    )
