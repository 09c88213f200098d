// The two output warpgroups: O += P V (256 dims each), and the epilogue.
#pragma once

#include "prefill_epilogue.cuh"

struct Output {
  const Params& p;
  u32 smem;
  Lane me;
  int half;              // which 256 dims
  Ring<kSlots> tile;
  Ring<kProbSlots> probs;
  float o[2][64];        // heads row (+8) of the warp's 16, dims 256*half + 128*i + 8n + 2*col (+1)

  DEVICE Output(const Params& params, u32 smem_base, Lane lane, int which)
      : p(params), smem(smem_base), me(lane), half(which) {}

  // O += P V of the next block, after scaling by what raised references ask for.
  DEVICE void accumulate(bool fresh) {
    mbar_wait(smem + kBarProbsFull + probs.slot * 8, probs.parity);
    if (load_shared(smem + kSmemRaised + (probs.slot * 4 + me.warp) * 4) && !fresh) {
      const u32 alpha = smem + kSmemAlpha + (probs.slot * kHeads + 16 * me.warp + me.row) * 4;
      const float a = load_shared_float(alpha), b = load_shared_float(alpha + 32);
#pragma unroll
      for (int i = 0; i < 128; i += 4) {
        float* t = &o[i >> 6][i & 63];
        t[0] *= a;
        t[1] *= a;
        t[2] *= b;
        t[3] *= b;
      }
    }
    const u64 weights = opaque(tile_descriptor<128>(smem + kSmemP, 16) +
                               probs.slot * descriptor_step(kProbsBytes));
    const u64 values = opaque(tile_descriptor<128>(smem + kSmemTiles, kTileGroup) +
                              tile.slot * descriptor_step(kTileBytes) +
                              half * descriptor_step(4 * kTileGroup));
    pin(o[0]);
    pin(o[1]);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        wgmma_m64n128_values(o[i], weights + descriptor_step(s * 32),
                             values + descriptor_step(i * 2 * kTileGroup + s * 16 * 128),
                             s || !fresh);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o[0]);
    pin(o[1]);
    __syncwarp();  // every lane has read alpha
    if (me.lane == 0) {
      mbar_arrive(smem + kBarTileFree + tile.slot * 8);
      mbar_arrive(smem + kBarProbsFree + probs.slot * 8);
    }
    probs.advance();
    tile.advance();
  }

  DEVICE void run(int first_item, int item_step) {
    u32 turn = 0;
    int rows = rows_of(p, first_item);
#pragma unroll 1
    for (int item = first_item; item < p.items; item += item_step, turn++) {
      const int blocks = blocks_of(rows);
      if (item + item_step < p.items) rows = rows_of(p, item + item_step);
      tile.advance();  // Q
      forget(o[0]);
      forget(o[1]);
#pragma unroll 1
      for (int block = 0; block < blocks; block++) accumulate(block == 0);
      const u32 at = smem + kSmemInverse + (turn % kItemSlots * kHeads + 16 * me.warp + me.row) * 4;
      const float inverse[2] = {load_shared_float(at), load_shared_float(at + 32)};
      store_output(p, o, me, half, item, inverse,
                   smem + kSmemCosSin + turn % kItemSlots * kRopeDims * 4);
    }
  }
};
