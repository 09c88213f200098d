// Q, as the score warps prepare it: bulk copy, RoPE, the tile's column order, the swizzle.
#pragma once

#include "layout.cuh"

struct Query {
  const Params& p;
  const u8* mem;
  u32 smem;
  int warp, lane;

  DEVICE Query(const Params& params, const u8* smem_base, Lane me)
      : p(params), mem(smem_base), smem(smem_address(smem_base)), warp(me.warp), lane(me.lane) {}

  // One thread starts the copies of an item's Q and of its cos/sin row; the last byte ends both.
  DEVICE void copy(int item) const {
    const int padded = p.head_tiles * kHeads;
    const u16* q = p.q + token_of(p, item) * p.q_stride + first_head(p, item) * 16;
    const u32 bar = smem + kBarQ;
    mbar_arrive_expect(bar, kTileBytes + kRopeDims * 4);
    if (padded == kHeads) {
      bulk_copy(smem + kSmemQ, q, kTileBytes, bar);
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < kDim / 16; chunk++)
        bulk_copy(smem + kSmemQ + chunk * kQChunk, q + chunk * padded * 16, kQChunk, bar);
    }
  }

  // The first copy, before the CTA's threads meet. One thread.
  DEVICE void copy_first(int item) const {
    mbar_init(smem + kBarQ, 1);
    fence_async_proxy();
    copy(item);
  }

  DEVICE void copy_cos_sin(int position, u32 parity) const {
    bulk_copy(smem + kSmemCosSin + parity * kRopeDims * 4, p.cos_sin + (i64)position * kRopeDims,
              kRopeDims * 4, smem + kBarQ);
  }

  // RoPE of adjacent pairs, fp32, rounded to bf16.
  DEVICE static u32 rotate(u32 pair, float cos, float sin) {
    const float a = __uint_as_float(pair << 16), b = __uint_as_float(pair & 0xffff0000u);
    return pack_bf16(__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)),
                     __fadd_rn(__fmul_rn(a, sin), __fmul_rn(b, cos)));
  }

  // In place, 16 dims of a head a lane: RoPE on the last four chunks, the tile's column order, the
  // swizzle. Lanes of swizzled heads read the halves in the other order, against bank conflicts.
  DEVICE void finish(u32 turn) const {
    mbar_wait(smem + kBarQ, turn & 1);
    const bool swapped = lane & 4;
    const float* cs = (const float*)(mem + kSmemCosSin) + (turn & 1) * kRopeDims + 8 * warp;
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      const u32 at = smem + kSmemQ + (4 * i + warp) * kQChunk + lane * 32 + (swapped ? 16 : 0);
      u32 a[2][4], b[2][4], v[2][8];
#pragma unroll
      for (int k = 0; k < 2; k++) {  // 32 heads each
        load_shared4(at + k * 1024, a[k]);
        load_shared4((at ^ 16) + k * 1024, b[k]);
      }
#pragma unroll
      for (int n = 0; n < 8; n++) {
        v[n / 4][n % 4] = swapped ? b[n / 4][n % 4] : a[n / 4][n % 4];
        v[n / 4][n % 4 + 4] = swapped ? a[n / 4][n % 4] : b[n / 4][n % 4];
      }
      if (i == 7) {
#pragma unroll
        for (int n = 0; n < 16; n++)
          v[n / 8][n % 8] = rotate(v[n / 8][n % 8], cs[n % 8], cs[n % 8 + kRopeDims / 2]);
      }
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 even[4], odd[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          even[n] = __byte_perm(v[k][2 * n], v[k][2 * n + 1], 0x5410);
          odd[n] = __byte_perm(v[k][2 * n], v[k][2 * n + 1], 0x7632);
        }
        store_shared4(at + k * 1024, even);
        store_shared4((at ^ 16) + k * 1024, odd);
      }
    }
    fence_async_proxy();
    bar_sync(kBarScores, kRoleThreads);
  }
};
