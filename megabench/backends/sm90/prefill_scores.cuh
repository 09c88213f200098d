// The score warpgroup: Q to registers with RoPE, S = Q K^T, softmax, probabilities.
//
// Most of Q is held in registers as wgmma's left operand, which spares shared memory half of what a
// product of scores would read. A warp owns 16 heads: no reduction leaves it. The softmax reference
// of a head is raised only when a score passes it by 2^kRaiseAbove.
#pragma once

#include "prefill_layout.cuh"

constexpr float kRaiseAbove = 40.f;      // log2; probabilities stay far inside bf16 and fp32
constexpr float kNoReference = -1e30f;
constexpr float kLn2 = 0.69314718055994531f, kLog2e = 1.4426950408889634f;

DEVICE void load_matrix4(u32 a, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(a)
               : "memory");
}

struct Scores {
  const Params& p;
  u32 smem;
  Lane me;
  Ring<kSlots> tile;
  Ring<kProbSlots> probs, sent;
  u32 q[kSteps - kSharedSteps][4];
  float x[32];           // scores: heads row (+8) of this warp's 16, KV rows 8n + 2*col (+1)
  float reference[2], sum[2], most[2];  // of heads row, row + 8; sum and most are this lane's share
  int index_lo, index_hi;

  DEVICE Scores(const Params& params, u32 smem_base, Lane lane)
      : p(params), smem(smem_base), me(lane) {}

  // RoPE of an adjacent pair, fp32, rounded to bf16.
  DEVICE static u32 rotate(u32 pair, float cos, float sin) {
    const float a = __uint_as_float(pair << 16), b = __uint_as_float(pair & 0xffff0000u);
    return pack_bf16(__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)),
                     __fadd_rn(__fmul_rn(a, sin), __fmul_rn(b, cos)));
  }

  // Q's fragments from the ring. A register holds two neighbouring dims, so RoPE is local to it.
  DEVICE void fetch_q(u32 turn) {
    mbar_wait(smem + kBarTileFull + tile.slot * 8, tile.parity);
    const int head = 16 * me.warp + (me.lane & 15);
    const u32 row = smem + kSmemTiles + tile.slot * kTileBytes + head * 128;
#pragma unroll
    for (int s = kSharedSteps; s < kSteps; s++)
      load_matrix4(row + s / 4 * kTileGroup + (((2 * (s & 3) + (me.lane >> 4)) ^ (head & 7)) << 4),
                   q[s - kSharedSteps]);
    const u32 cs = smem + kSmemCosSin + (turn % kItemSlots * kRopeDims + me.col) * 4;
#pragma unroll
    for (int t = 0; t < 4; t++) {
      u32(&v)[4] = q[kSteps - 4 - kSharedSteps + t];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int pair = 8 * t + 4 * (k >> 1);
        v[k] = rotate(v[k], load_shared_float(cs + pair * 4),
                      load_shared_float(cs + (pair + kRopeDims / 2) * 4));
      }
    }
    __syncwarp();  // an arrival speaks for its own thread
    if (me.lane < 2) mbar_arrive(smem + kBarTileFree + tile.slot * 8);  // for eight output warps
    tile.advance();
    mbar_wait(smem + kBarQFull, turn & 1);
  }

  // S = Q K^T of the next tile. Copies land before their barrier completes, which is why no proxy
  // fence stands here: with one a part of a tile, an earlier schedule took 5 % longer.
  DEVICE void multiply() {
    const u64 qs = opaque(tile_descriptor<128>(smem + kSmemQ, 16));
    const u64 k = opaque(tile_descriptor<128>(smem + kSmemTiles, 16) +
                         tile.slot * descriptor_step(kTileBytes));
    mbar_wait(smem + kBarTileFull + tile.slot * 8, tile.parity);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const u64 step = descriptor_step(s / 4 * kTileGroup + s % 4 * 32);
      if (s < kSharedSteps) wgmma_m64n64(x, qs + step, k + step, s);
      else wgmma_from_registers<64>(x, q[s - kSharedSteps], k + step, s);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(x);
    tile.advance();
  }

  // Valid rows of a block: bit i of (lo, hi). Loads first, votes in `mask`.
  DEVICE void fetch_mask(const int* list, int block, int rows) {
    const int column = block * kBlock + me.lane;
    index_lo = column < rows ? load_global(list + column) : -1;
    index_hi = column + 32 < rows ? load_global(list + column + 32) : -1;
  }
  DEVICE void mask() {
    const u32 lo = __ballot_sync(~0u, (u32)index_lo < (u32)p.s_kv);
    const u32 hi = __ballot_sync(~0u, (u32)index_hi < (u32)p.s_kv);
    if ((lo & hi) == ~0u) return;
    const u32 l = lo >> (2 * me.col), h = hi >> (2 * me.col);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const u32 bits = (n < 4 ? l : h) >> (8 * (n & 3));
      if (!(bits & 1)) x[4 * n] = x[4 * n + 2] = -kInfinity;
      if (!(bits & 2)) x[4 * n + 1] = x[4 * n + 3] = -kInfinity;
    }
  }

  // Raises references to the block's maxima; publishes what older sums are scaled by.
  DEVICE void raise(float (&top)[2]) {
    const u32 alphas = smem + kSmemAlpha + (probs.slot * kHeads + 16 * me.warp + me.row) * 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int d = 1; d < 4; d <<= 1) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], d));
      const float raised = fmaxf(reference[r], __fmul_rn(top[r], p.scale_log2));
      const float alpha = exp2_approx(reference[r] - raised);
      reference[r] = raised;
      sum[r] *= alpha;
      if (me.col == 0) store_shared_float(alphas + 32 * r, alpha);
    }
  }

  // Scores -> probabilities, into their slot.
  DEVICE void softmax() {
    float scale = p.scale_log2;
    float top[2] = {x[0], x[2]};
#pragma unroll
    for (int i = 1; i < 32; i++)
      if (i != 2) top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], x[i]);
    most[0] = fmaxf(most[0], top[0]);
    most[1] = fmaxf(most[1], top[1]);
    const bool raised = __any_sync(~0u, top[0] * scale > reference[0] + kRaiseAbove ||
                                            top[1] * scale > reference[1] + kRaiseAbove);
    mbar_wait(smem + kBarProbsFree + probs.slot * 8, probs.parity ^ 1);
    if (raised) {
      raise(top);
      // Products rounded as the new references are: the largest score's probability is 1 exactly,
      // and so is the output of a token with one row.
#pragma unroll
      for (int i = 0; i < 32; i++) x[i] = __fmul_rn(x[i], scale);
      scale = 1.f;
    }
    if (me.lane == 0) store_shared(smem + kSmemRaised + (probs.slot * 4 + me.warp) * 4, raised);
    const u32 to = smem + kSmemP + probs.slot * kProbsBytes + (16 * me.warp + (me.lane & 15)) * 128;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 v[4];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float* t = x + 8 * s + 4 * k;
        const float a = exp2_approx(fmaf(t[0], scale, -reference[0]));
        const float b = exp2_approx(fmaf(t[1], scale, -reference[0]));
        const float c = exp2_approx(fmaf(t[2], scale, -reference[1]));
        const float d = exp2_approx(fmaf(t[3], scale, -reference[1]));
        sum[0] += a + b;
        sum[1] += c + d;
        v[2 * k] = pack_bf16(a, b);
        v[2 * k + 1] = pack_bf16(c, d);
      }
      store_matrix4(to + (((2 * s + (me.lane >> 4)) ^ (me.lane & 7)) << 4), v[0], v[1], v[2], v[3]);
    }
    fence_async_proxy();
    probs.advance();
  }
  // Hands the oldest probabilities to the output warps.
  DEVICE void send() {
    __syncwarp();
    if (me.lane == 0) mbar_arrive(smem + kBarProbsFull + sent.slot * 8);
    sent.advance();
  }

  // The heads' 1 / (sum + sink), for the output warps; stores lse and max_logits.
  DEVICE void normalize(int item, u32 turn) {
    const int head = first_head(p, item) + 16 * me.warp + me.row;
    const u32 inverse =
        smem + kSmemInverse + (turn % kItemSlots * kHeads + 16 * me.warp + me.row) * 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int d = 1; d < 4; d <<= 1) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], d);
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], d));
      }
      const bool any = sum[r] > 0.f;
      const float sink = p.sink ? __ldg(p.sink + head + 8 * r) : -kInfinity;
      const i64 at = (i64)token_of(p, item) * p.head_tiles * kHeads + head + 8 * r;
      if (me.col == 0) {
        store_shared_float(
            inverse + 32 * r,
            any ? __fdividef(1.f, sum[r] + exp2_approx(sink * kLog2e - reference[r])) : 0.f);
        p.lse[at] = any ? (reference[r] + log2_approx(sum[r])) * kLn2 : kInfinity;
        p.max_logits[at] = most[r] * p.sm_scale;
      }
    }
  }

  DEVICE void run(int first_item, int item_step) {
    u32 turn = 0;
    int rows = rows_of(p, first_item);
#pragma unroll 1
    for (int item = first_item; item < p.items; item += item_step, turn++) {
      const int* list = p.indices + token_of(p, item) * p.index_stride;
      const int blocks = blocks_of(rows), mine = rows;
      if (item + item_step < p.items) rows = rows_of(p, item + item_step);
      fetch_q(turn);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        reference[r] = kNoReference;
        sum[r] = 0.f;
        most[r] = -kInfinity;
      }
#pragma unroll 1
      for (int block = 0; block < blocks; block++) {
        fetch_mask(list, block, mine);
        multiply();
        const bool last = block + 1 == blocks;
        if (last && me.lane == 0) mbar_arrive(smem + kBarQFree);
        // Only now do the output warps get the last block's probabilities: their products, side
        // by side with this one, would end with it and leave the tensor cores idle in the softmax.
        if (block > 0) send();
        mask();
        softmax();
        if (last) {
          normalize(item, turn);
          send();
        }
      }
    }
  }
};
