// The score warpgroup: S^T = K Q^T, softmax, P^T. It also prepares Q and runs the index cursor.
//
// KV rows lie along M, so a row mask is local to a lane and P^T needs no transpose. The softmax
// reference of a head is raised only when a score passes it by 2^kRaiseAbove, which one barrier a
// block decides: the common path has no maximum across lanes, and the output is rarely rescaled.
#pragma once

#include "cluster.cuh"
#include "cursor.cuh"
#include "query.cuh"

constexpr float kRaiseAbove = 40.f;      // log2; probabilities stay far inside bf16 and fp32

struct Scores {
  const Params& p;
  u8* mem;
  u32 smem;
  int warp, lane, row, col;
  float x[32];       // scores of rows 16*warp + row (+8), heads 8n + 2*col (+1)
  float sum[16];     // this lane's share of each of its heads' sums
  bool have_reference;

  DEVICE Scores(const Params& params, u8* smem_base, Lane me)
      : p(params), mem(smem_base), smem(smem_address(smem_base)), warp(me.warp), lane(me.lane),
        row(me.row), col(me.col) {}

  DEVICE float* floats(u32 at) { return (float*)(mem + at); }
  DEVICE void sync() { bar_sync(kBarScores, kRoleThreads); }

  // A sink for every thread that has one.
  DEVICE void copy_sinks(int thread) {
    if (thread >= p.head_tiles * kHeads) return;
    if (p.sink) copy4(smem + kSmemSink + 4 * thread, p.sink + thread);
    else floats(kSmemSink)[thread] = -kInfinity;
  }

  DEVICE void multiply(u32 tile) {
    const u64 k = tile_descriptor<128>(smem + kSmemKV + tile * kTileBytes, 16);
    const u64 q = tile_descriptor<32>(smem + kSmemQ, 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int s = 0; s < 4; s++)
        wgmma_m64n64(x, k + descriptor_step(i * kTileGroup + s * 32),
                     q + descriptor_step((4 * i + s) * kQChunk), i || s);
    wgmma_commit();
    wgmma_wait<0>();
    pin(x);
  }

  // x becomes log2 of each probability over the reference; raised references are published.
  DEVICE void reference(u32 block, bool fp4) {
    const u32 tile = block & 1;
    const u32* offsets =
        (const u32*)(mem + kSmemOffsets) + block % kSlots * kBlock + 16 * warp + row;
    const bool live0 = offsets[0] != kNoRow, live1 = offsets[8] != kNoRow;
    const float scale = fp4 ? p.scale_log2 * kFp4Up : p.scale_log2;
    const float bias = fp4 ? kFp4Shift : 0.f;
    const float* neg = floats(kSmemNegRef) + (fp4 ? kHeads : 0) + 2 * col;
    if (__any_sync(~0u, !live0 || !live1)) {
#pragma unroll
      for (int n = 0; n < 32; n++)
        if (n & 2 ? !live1 : !live0) x[n] = -kInfinity;
    }
    float top = -kInfinity;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float2 r = have_reference ? *(const float2*)(neg + 8 * n) : make_float2(bias, bias);
      x[4 * n] = fmaf(x[4 * n], scale, r.x);
      x[4 * n + 1] = fmaf(x[4 * n + 1], scale, r.y);
      x[4 * n + 2] = fmaf(x[4 * n + 2], scale, r.x);
      x[4 * n + 3] = fmaf(x[4 * n + 3], scale, r.y);
      top = fmaxf(fmaxf(top, fmaxf(x[4 * n], x[4 * n + 1])), fmaxf(x[4 * n + 2], x[4 * n + 3]));
    }
    bool raised = false;
    const bool above =
        !have_reference || bar_any(kBarScores, kRoleThreads, top > kRaiseAbove + bias);
    if (__any_sync(~0u, above))  // alike in all lanes, as a vote says: raise takes less code
      raised = raise(tile, bias, live0 || live1);
    if (warp == 0 && lane == 0) *(volatile u32*)(mem + kSmemRaised + 4 * tile) = raised;
  }

  // One exchange with the lane `distance` away: each keeps and combines half of the values.
  template <int Held, class Op> DEVICE void halve(float (&v)[16], int distance, Op combine) {
    const bool upper = lane & distance;
#pragma unroll
    for (int i = 0; i < Held; i++) {
      const float got = __shfl_xor_sync(~0u, upper ? v[i] : v[i + Held], distance);
      v[i] = combine(upper ? v[i + Held] : v[i], got);
    }
  }

  // Combines 16 values (heads 8*(n/2) + 2*col + n%2) over the eight rows of lanes and stores each
  // warp's result per head.
  template <class Op> DEVICE void store_over_rows(float (&v)[16], Op combine) {
    halve<8>(v, 4, combine);
    halve<4>(v, 8, combine);
    halve<2>(v, 16, combine);
    const int eight = (lane & 4) + (lane >> 2 & 2) + (lane >> 4 & 1);  // which 8 heads are left
    *(float2*)(floats(kSmemReduce) + warp * kHeads + 8 * eight + 2 * col) = make_float2(v[0], v[1]);
  }

  // New references: the block's maximum per head. True when sums and outputs were rescaled.
  DEVICE bool raise(u32 tile, float bias, bool live) {
    const float* most = floats(kSmemReduce);
    float top[16];
#pragma unroll
    for (int n = 0; n < 16; n++) top[n] = fmaxf(x[n / 2 * 4 + n % 2], x[n / 2 * 4 + n % 2 + 2]);
    store_over_rows(top, [](float a, float b) { return fmaxf(a, b); });
    if (!bar_any(kBarScores, kRoleThreads, live)) return false;  // a masked block: no reference yet
    const int head = 32 * warp + lane;
    if (head < kHeads) {
      float delta = fmaxf(fmaxf(most[head], most[kHeads + head]),
                          fmaxf(most[2 * kHeads + head], most[3 * kHeads + head])) -
                    bias;
      float reference = delta;
      if (have_reference) {
        delta = fmaxf(delta, 0.f);
        reference = delta - floats(kSmemNegRef)[head];
      }
      floats(kSmemDelta)[head] = delta;
      floats(kSmemNegRef)[head] = -reference;
      floats(kSmemNegRef)[kHeads + head] = kFp4Shift - reference;
      floats(kSmemAlpha)[tile * kHeads + head] = exp2_approx(-delta);
    }
    sync();
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float2 d = *(const float2*)(floats(kSmemDelta) + 8 * n + 2 * col);
      x[4 * n] -= d.x;
      x[4 * n + 1] -= d.y;
      x[4 * n + 2] -= d.x;
      x[4 * n + 3] -= d.y;
      if (have_reference) {
        const float2 a = *(const float2*)(floats(kSmemAlpha) + tile * kHeads + 8 * n + 2 * col);
        sum[2 * n] *= a.x;
        sum[2 * n + 1] *= a.y;
      }
    }
    const bool rescale = have_reference;
    have_reference = true;
    return rescale;
  }

  // Probabilities: fp32 into the sums, bf16 into P^T once the previous P^T has been used.
  DEVICE void probabilities(u32 block, bool fp4) {
    const float weight = fp4 ? kFp4Down : 1.f;
    u32 packed[8][2];
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float a = exp2_approx(x[4 * n]), b = exp2_approx(x[4 * n + 1]);
      const float c = exp2_approx(x[4 * n + 2]), d = exp2_approx(x[4 * n + 3]);
      sum[2 * n] = fmaf(a + c, weight, sum[2 * n]);
      sum[2 * n + 1] = fmaf(b + d, weight, sum[2 * n + 1]);
      packed[n][0] = pack_bf16(a, b);
      packed[n][1] = pack_bf16(c, d);
    }
    if (block > 0)  // the last step of the previous block has been multiplied
      mbar_wait(smem + kBarTileFree + (((block - 1) & 1) * kSteps + kSteps - 1) * 8,
                ((block - 1) >> 1) & 1);
    const u32 to = smem + kSmemP + (16 * warp + ((lane >> 3) & 1) * 8 + (lane & 7)) * 128 +
                   (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < 8; n += 2)
      store_matrix4(to ^ (n << 4), packed[n][0], packed[n][1], packed[n + 1][0], packed[n + 1][1]);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbar_arrive(smem + kBarProbsFull + 8 * (block & 1));
  }

  // Sums of the item over all rows of this CTA: (reference, sum) of head 32*warp + lane < 64.
  DEVICE float2 totals() {
    const float* part = floats(kSmemReduce);
    store_over_rows(sum, [](float a, float b) { return a + b; });
    sync();
    const int head = (32 * warp + lane) % kHeads;
    const float total = (part[head] + part[kHeads + head]) +
                        (part[2 * kHeads + head] + part[3 * kHeads + head]);
    return make_float2(have_reference ? -floats(kSmemNegRef)[head] : kNoReference, total);
  }
};

DEVICE void score_role(const Params& p, u8* mem, int warp, int first_item, int item_step,
                       int rank) {
  const Lane me(warp);
  Scores s(p, mem, me);
  Query q(p, mem, me);
  const u32 smem = s.smem;
  const bool leader = me.warp == 0 && me.lane == 0;
  const int thread = 32 * me.warp + me.lane;
  Cursor cursor(p, smem, me, first_item, item_step, rank);
  if (!kClustered && leader) copy4(smem + kSmemNextPosition, p.positions + token_of(p, first_item));
  copy_commit();
  cursor.start();
  bar_arrive(kBarStart, kThreads);  // enough to begin the first tile
  if (!kClustered && leader) q.copy_cos_sin(load_shared(smem + kSmemNextPosition), 0);
#pragma unroll 1
  while (cursor.published < kLookahead) cursor.publish_next();
  bar_arrive(kBarLookahead, 2 * kRoleThreads);
  bar_arrive(kBarPrefetch, 3 * kRoleThreads);
  if (!kClustered) {
    cursor.fetch();
    s.copy_sinks(thread);
  }

  u32 block = 0, turn = 0;
#pragma unroll 1
  for (int item = first_item; item < p.items; item += item_step, turn++) {
    const int next = item + item_step;
    const bool more = !kClustered && next < p.items;
    if (more && leader) copy4(smem + kSmemNextPosition, p.positions + token_of(p, next));
    copy_commit();
    q.finish(turn);
    if (kClustered) {  // what can wait until Q is ready
      cursor.fetch();
      arrive_early(p);
      s.copy_sinks(thread);
      copy_commit();
      mbar_wait(smem + kBarFirstTile, 0);
    } else {
      copy_wait<0>();
    }
    s.have_reference = false;
#pragma unroll
    for (int n = 0; n < 16; n++) s.sum[n] = 0.f;
    bool last;
#pragma unroll 1
    do {
      mbar_wait(smem + kBarTileFull + 8 * (block & 1), (block >> 1) & 1);
      const u32 meta = load_shared(smem + kSmemMeta + block % kSlots * 4);
      const bool fp4 = kExtraFp4 && (meta & kMetaExtra);
      last = meta & kMetaLast;
      s.multiply(block & 1);
      s.reference(block, fp4);
      if (more && last && leader) {  // every warp is past its last product: Q may go,
        if (turn > 0) mbar_wait(smem + kBarItemDone, (turn - 1) & 1);  // and the old cos/sin
        q.copy(next);
        q.copy_cos_sin(load_shared(smem + kSmemNextPosition), (turn + 1) & 1);
      }
      s.probabilities(block, fp4);
      cursor.advance();
      block++;
    } while (!last);
    const float2 t = s.totals();
    const int head = 32 * me.warp + me.lane;
    if (!kClustered) {
      if (me.warp < 2) {
        const int token = token_of(p, item), at = first_head(p, item) + head;
        if (!more && turn > 0)  // or a last item of one block would complete Inverse twice unseen
          mbar_wait(smem + kBarItemDone, (turn - 1) & 1);
        s.floats(kSmemInverse)[(turn & 1) * kHeads + head] =
            inverse_sum(t.x, t.y, s.floats(kSmemSink)[first_head(p, item) + head]);
        p.lse[(i64)token * p.head_tiles * kHeads + at] = natural_lse(t.x, t.y);
        __syncwarp();
        if (me.lane == 0) mbar_arrive(smem + kBarInverse);
      }
    } else {
      meet(p);
      if (me.warp < 2) {
        const u32 at = smem + stats_at(p) + (rank * kHeads + head) * 8;
#pragma unroll 1
        for (int peer = 0; peer < p.split; peer++) store_remote2(map_to_rank(at, peer), t.x, t.y);
      }
      copy_wait<0>();  // the sinks
      cluster_sync();
      break;  // a cluster has one item
    }
  }
}
