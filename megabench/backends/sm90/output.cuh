// The two output warpgroups: O = P V (256 dims each), and the epilogue from registers.
//
// Fragments: lane (row, col) of warp w holds heads 16w + row and 16w + row + 8. By the tile's
// column order it owns dims 4*col .. +3 of every 16: RoPE pairs are local, the amax over 32 dims
// takes two shuffles, and eight rows are one wo_a group, whose 32-dim chunk is 256 contiguous bytes
// of output.
#pragma once

#include "cursor.cuh"
#include "scores.cuh"

constexpr int kPartChunks = kUnitChunks / 2;  // of o[0], and of o[1]

struct Output {
  const Params& p;
  u8* mem;
  u32 smem;
  Lane me;
  int half;            // which 256 dims
  float o[2][64];

  DEVICE Output(const Params& params, u8* smem_base, Lane lane, int which)
      : p(params), mem(smem_base), smem(smem_address(smem_base)), me(lane), half(which) {}

  // Chunk j (0..7) of this half, or of the part computed of it, heads 16*warp + 8*r + row.
  DEVICE Chunk fragment(int j, int r) const {
    Chunk c;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* t = o[j >> 2] + (j & 3) * 16 + i * 8 + 2 * r;
      c.v[4 * i] = t[0];
      c.v[4 * i + 1] = t[4];
      c.v[4 * i + 2] = t[1];
      c.v[4 * i + 3] = t[5];
    }
    return c;
  }

  // Brings an item's Q into L2 ahead of its copy. One thread.
  DEVICE void prefetch_q(int item) const {
    const u16* q = p.q + token_of(p, item) * p.q_stride + first_head(p, item) * 16;
    const int pieces = p.head_tiles == 1 ? 1 : kDim / 16;
#pragma unroll 1
    for (int i = 0; i < pieces; i++)
      bulk_prefetch_l2(q + i * p.head_tiles * kHeads * 16, kTileBytes / pieces);
  }

  // P V of all of this half, or of 128 dims (`part`), into o[0].
  template <int Parts> DEVICE void accumulate(u32 block, bool first, int part) {
    const u32 tile = block & 1;
    if (*(volatile u32*)(mem + kSmemRaised + 4 * tile)) {
      const float* alpha = (const float*)(mem + kSmemAlpha) + tile * kHeads + 16 * me.warp + me.row;
      const float a = alpha[0], b = alpha[8];
#pragma unroll
      for (int i = 0; i < 64 * Parts; i += 4) {
        float* t = &o[i >> 6][i & 63];
        t[0] *= a;
        t[1] *= a;
        t[2] *= b;
        t[3] *= b;
      }
    }
    const u64 probs = tile_descriptor<128>(smem + kSmemP, kTileGroup);
    const u64 values = tile_descriptor<128>(
        smem + kSmemKV + tile * kTileBytes + (4 * half + 2 * part) * kTileGroup, kTileGroup);
    const u32 free = smem + kBarTileFree + tile * kSteps * 8;
#pragma unroll
    for (int i = 0; i < Parts; i++) pin(o[i]);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const u64 step = descriptor_step(s * kStep * 128);
      wgmma_m64n128(o[0], probs + step, values + step, s || !first);
      if (Parts == 2)
        wgmma_m64n128(o[1], probs + step, values + step + descriptor_step(2 * kTileGroup),
                      s || !first);
      wgmma_commit();
      if (s > 0) {
        wgmma_wait<1>();
        if (me.lane == 0) mbar_arrive(free + (s - 1) * 8);
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Parts; i++) pin(o[i]);
    __syncwarp();  // every lane has read what the score warps write next
    if (me.lane == 0) mbar_arrive(free + (kSteps - 1) * 8);
  }

  DEVICE void store_item(int item, u32 turn) {
    const float* inverse = (const float*)(mem + kSmemInverse) + (turn & 1) * kHeads;
    const float* cos_sin = (const float*)(mem + kSmemCosSin) + (turn & 1) * kRopeDims;
    u8* out = chunk_out(p, item, 2 * me.warp, half * 8) + code_offset(me);
    const float inv0 = inverse[16 * me.warp + me.row], inv1 = inverse[16 * me.warp + 8 + me.row];
    u32 bytes = 0;  // of chunks col and col + 4, rows and rows + 8
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      Chunk c[4] = {fragment(j, 0), fragment(j, 1), fragment(j + 1, 0), fragment(j + 1, 1)};
      if (j == 6 && half == 1) {
#pragma unroll
        for (int n = 0; n < 4; n++) rotate_back(c[n], cos_sin, n / 2, me.col);
      }
      constexpr u32 kChunkBytes = kWvGroup * kOutChunk, kGroupBytes = kOutChunks * kChunkBytes;
      u8* const to = out + j * kChunkBytes;
      u32 byte[4];
      quantize<4>(c, {inv0, inv1, inv0, inv1},
                  {to, to + kGroupBytes, to + kChunkBytes, to + kChunkBytes + kGroupBytes}, byte,
                  me.col);
      const int place = 8 * (j >> 2);
      if (me.col == (j & 3)) bytes |= byte[0] << place | byte[1] << (place + 16);
      if (me.col == (j & 3) + 1) bytes |= byte[2] << place | byte[3] << (place + 16);
    }
    const int r = (me.row >> 1) & 1, j = me.col + 4 * (me.row & 1);
    *scale_out(p, item, 2 * me.warp + r, half * 8 + j, me.row >> 2) =
        transpose_bytes(bytes, me.row);
  }

  // Sends the CTAs of the cluster their units' partial outputs and finishes this CTA's units.
  DEVICE void reduce_over_cluster(int item, int rank, const Share& share) {
    const int split = p.split;
    meet(p);
    int chunk = share.chunk0 & ~(kPartChunks - 1);  // o[0] begins here
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int j = 0; j < kPartChunks; j++, chunk++) {
        if ((u32)(chunk - share.chunk0) >= (u32)share.chunks) continue;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int unit = (2 * me.warp + r) * share.chunks + chunk - share.chunk0;
          const int owner = unit * split >> share.bits;
          const u32 place = ((unit & share.places) * 2 + half) * split + rank;
          const u32 at = map_to_rank(smem + parts_at(p) + place * 1024, owner) + me.lane * 16;
          const Chunk c = fragment(j, r);
          store_remote4(at, c.v[0], c.v[1], c.v[2], c.v[3]);
          store_remote4(at + 512, c.v[4], c.v[5], c.v[6], c.v[7]);
        }
      }
      if (chunk >= share.chunk0 + share.chunks) break;
#pragma unroll
      for (int i = 0; i < 64; i++) o[0][i] = o[1][i];
    }
    cluster_sync();
#pragma unroll 1
    for (int k = 4 * half + me.warp; k < 2 * share.owned; k += 8)
      add_parts(p, mem, me, item, share, k);
  }
};

// A cluster's, after the first tile.
DEVICE void output_of_cluster(Output& out, int item, int rank) {
  const Params& p = out.p;
  const u32 smem = out.smem;
  const int warp = 4 * out.half + out.me.warp;
  const Share share(p, rank);
  // A replica computes no more than the 128 dims of each half that it finishes a part of.
  const int part = p.replicas > 1 ? share.chunk0 / kPartChunks : -1;
  bar_sync(kBarPrefetch, 3 * kRoleThreads);
  mbar_wait(smem + kBarTileFull, 0);  // the first tile comes before the next blocks
#pragma unroll 1
  for (int b = 1; b < kPrefetch; b++) prefetch_rows(p, smem, b, warp, out.me.lane);
  forget(out.o[0]);
  forget(out.o[1]);
  u32 block = 0;
  bool last;
#pragma unroll 1
  do {
    mbar_wait(smem + kBarProbsFull + 8 * (block & 1), (block >> 1) & 1);
    last = load_shared(smem + kSmemMeta + (block % kSlots) * 4) & kMetaLast;
    if (part < 0) out.accumulate<2>(block, block == 0, 0);
    else out.accumulate<1>(block, block == 0, part);
    prefetch_rows(p, smem, block + kPrefetch, warp, out.me.lane);
    block++;
  } while (!last);
  out.reduce_over_cluster(item, rank, share);
}

DEVICE void output_role(const Params& p, u8* mem, int warp, int half, int first_item, int item_step,
                        int rank) {
  const Lane me(warp);
  Output out(p, mem, me, half);
  if (kClustered) {
    output_of_cluster(out, first_item, rank);
    return;
  }
  const u32 smem = out.smem;
  const bool leader = half == 0 && me.warp == 0 && me.lane == 0;
  u32 block = 0, turn = 0;
  if (leader) Query(p, mem, me).copy_first(first_item);
  __syncthreads();
  bar_sync(kBarStart, kThreads);
#pragma unroll 1
  for (int b = 0; b < kPrefetch; b++) {
    if (b == 1) {  // the first tile and Q come before the next blocks
      bar_sync(kBarPrefetch, 3 * kRoleThreads);
      mbar_wait(smem + kBarTileFull, 0);
    }
    prefetch_rows(p, smem, b, 4 * half + warp, me.lane);
  }
#pragma unroll 1
  for (int item = first_item; item < p.items; item += item_step, turn++) {
    if (leader && item + item_step < p.items) out.prefetch_q(item + item_step);
    forget(out.o[0]);
    forget(out.o[1]);
    bool first = true, last;
#pragma unroll 1
    do {
      const u32 tile = block & 1;
      mbar_wait(smem + kBarProbsFull + 8 * tile, (block >> 1) & 1);
      last = load_shared(smem + kSmemMeta + (block % kSlots) * 4) & kMetaLast;
      out.accumulate<2>(block, first, 0);
      first = false;
      prefetch_rows(p, smem, block + kPrefetch, 4 * half + warp, me.lane);
      block++;
    } while (!last);
    mbar_wait(smem + kBarInverse, turn & 1);
    out.store_item(item, turn);
    __syncwarp();
    if (me.lane == 0) mbar_arrive(smem + kBarItemDone);
  }
}
