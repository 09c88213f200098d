// The loader warpgroup: Q of every item, then its KV rows, 16 bytes a lane straight into swizzled
// tiles.
//
// Eight lanes copy 128 bytes of a row; a warp has four rows at a time, a lane rows r, r+16, r+32,
// r+48 of a block. A masked row is filled with zeros and never read.
#pragma once

#include "prefill_layout.cuh"

constexpr int kLaneRows = 4;

struct Loader {
  const Params& p;
  u32 smem;
  int thread;
  u32 to;                 // where the lane's first 16 bytes of row r go in slot 0
  Ring<kSlots> ring;      // of the next tile
  int index[kLaneRows];   // of the next block
  const u8* from[kLaneRows];
  u32 bytes[kLaneRows];

  DEVICE Loader(const Params& params, u32 smem_base, int thread_)
      : p(params), smem(smem_base), thread(thread_) {
    const int row = thread >> 3, unit = thread & 7;
    to = smem + kSmemTiles + row * 128 + ((unit ^ (row & 7)) << 4);
  }

  DEVICE void fetch(int item, int block) {
    const int* list = p.indices + token_of(p, item) * p.index_stride;
#pragma unroll
    for (int j = 0; j < kLaneRows; j++) {
      const int column = block * kBlock + (thread >> 3) + 16 * j;
      index[j] = column < p.topk ? load_global(list + column) : -1;
    }
  }
  // The fetched indices become addresses of a block's rows.
  DEVICE void resolve(int block, int rows) {
#pragma unroll
    for (int j = 0; j < kLaneRows; j++) {
      const int column = block * kBlock + (thread >> 3) + 16 * j;
      const bool live = column < rows && (u32)index[j] < (u32)p.s_kv;
      bytes[j] = live ? 16 : 0;
      from[j] = p.kv + (i64)(live ? index[j] : 0) * (kDim * 2) + (thread & 7) * 16;
    }
  }

  // The last dims of Q take a tile of the ring, which the scores soon copy to registers; the first
  // dims stay in shared memory until the item's last product.
  DEVICE void load_q(int item, u32 turn, int position) {
    const int head = thread >> 1, half = thread & 1;
    const i64 pitch = p.head_tiles * kQChunk;
    const u8* q = (const u8*)(p.q + token_of(p, item) * p.q_stride) +
                  (first_head(p, item) + head) * 32 + half * 16;
    const u32 tile = smem + kSmemTiles + ring.slot * kTileBytes + head * 128;
    mbar_wait(smem + kBarTileFree + ring.slot * 8, ring.parity ^ 1);
#pragma unroll 4
    for (int c = kSharedSteps; c < kSteps; c++)
      copy16(tile + c / 4 * kTileGroup + swizzled(c, head, half), q + c * pitch);
    if (thread < kRopeDims / 4)
      copy16(smem + kSmemCosSin + turn % kItemSlots * kRopeDims * 4 + thread * 16,
             p.cos_sin + (i64)position * kRopeDims + thread * 4);
    arrive_after_copies(smem + kBarTileFull + ring.slot * 8);
    ring.advance();
    mbar_wait(smem + kBarQFree, (turn & 1) ^ 1);
#pragma unroll
    for (int c = 0; c < kSharedSteps; c++)
      copy16(smem + kSmemQ + head * 128 + c / 4 * kTileGroup + swizzled(c, head, half),
             q + c * pitch);
    arrive_after_copies(smem + kBarQFull);
  }
  // Where half `half` of 16-dim chunk c lies in a head's 128 bytes.
  DEVICE static u32 swizzled(int c, int head, int half) {
    return ((2 * (c & 3) + half) ^ (head & 7)) << 4;
  }

  DEVICE void load_tile() {
    mbar_wait(smem + kBarTileFree + ring.slot * 8, ring.parity ^ 1);
    const u32 tile = to + ring.slot * kTileBytes;
#pragma unroll
    for (int g = 0; g < kDim / kGroupDims; g++)
#pragma unroll
      for (int j = 0; j < kLaneRows; j++)
        copy16(tile + g * kTileGroup + j * 16 * 128, from[j] + g * 128, bytes[j]);
    arrive_after_copies(smem + kBarTileFull + ring.slot * 8);
    ring.advance();
  }

  DEVICE void prefetch_q(int item) const {
    const u16* q = p.q + token_of(p, item) * p.q_stride + first_head(p, item) * 16;
    const int pieces = p.head_tiles == 1 ? 1 : kDim / 16;
#pragma unroll 1
    for (int i = 0; i < pieces; i++)
      bulk_prefetch_l2(q + i * p.head_tiles * kHeads * 16, kTileBytes / pieces);
  }
};

DEVICE void loader_role(const Params& p, u32 smem, int first_item, int item_step) {
  Loader loader(p, smem, threadIdx.x % kRoleThreads);
  u32 turn = 0;
  int rows = rows_of(p, first_item), position = load_global(p.positions + token_of(p, first_item));
  loader.fetch(first_item, 0);
#pragma unroll 1
  for (int item = first_item; item < p.items; item += item_step, turn++) {
    const int next = item + item_step < p.items ? item + item_step : item;
    loader.load_q(item, turn, position);
    if (loader.thread == 0 && next != item) loader.prefetch_q(next);
    const int blocks = blocks_of(rows);
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
      loader.resolve(block, rows);
      const bool last = block + 1 == blocks;
      loader.fetch(last ? next : item, last ? 0 : block + 1);
      if (block == 0) position = load_global(p.positions + token_of(p, next));
      loader.load_tile();
    }
    rows = rows_of(p, next);
  }
  copy_wait<0>();
}
