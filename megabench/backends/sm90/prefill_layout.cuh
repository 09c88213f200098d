// Prefill: launch parameters (mirrored by prefill_launch.py), tile constants, shared memory.
#pragma once

#include "prefill_wgmma.cuh"
#include "ring.cuh"

constexpr int kHeads = 64;        // heads of one work item: one wgmma M
constexpr int kDim = 512;         // K and V are the same 512-wide row
constexpr int kBlock = 64;        // KV rows of one tile
constexpr int kGroupDims = 64;    // dims of a 128-byte swizzled tile row
constexpr u32 kSlots = 3;         // tiles in shared memory
constexpr u32 kProbSlots = 2;     // blocks of probabilities
constexpr u32 kItemSlots = 4;     // items whose cos/sin and sums are kept
constexpr int kSteps = kDim / 16; // wgmmas of one product of scores
constexpr int kSharedSteps = 8;   // those whose Q stays in shared memory; whole groups
constexpr int kOutChunk = 32;     // dims under one output scale
constexpr int kOutChunks = kDim / kOutChunk;
constexpr int kWvGroup = 8;       // heads of one wo_a group
constexpr int kRopeDims = 64;     // the last dims of a row

constexpr int kThreads = 512, kRoleThreads = 128;
constexpr int kLoaderRegisters = 32, kScoreRegisters = 160, kOutputRegisters = 160;

struct Params {
  const u16* q;              // bf16 [s_q][32 chunks][padded heads][16]
  const u8* kv;              // bf16 [s_kv][512]
  const int* indices;        // [s_q][topk]
  const int* lengths;        // valid columns per token, or null for topk
  const int* positions;      // [s_q]
  const float* cos_sin;      // [P][32 cos | 32 sin]
  const float* sink;         // [padded heads] or null
  u8* out;                   // e4m3 [s_q][groups][16 chunks][8 heads][32]
  u32* scales;               // ue8m0 x 4, word (chunk*8 + head)/4, MN-major
  float* max_logits;         // [s_q][padded heads]
  float* lse;                // [s_q][padded heads]
  i64 q_stride;              // elements per token
  i64 index_stride;
  i64 scale_word, scale_group;  // strides in words
  int s_kv, topk;
  int items;                 // tokens x head tiles
  int head_tiles;            // padded heads / 64
  float sm_scale;
  float scale_log2;          // sm_scale * log2(e)
};

// ---- shared memory, bytes
constexpr u32 kTileGroup = kBlock * 128;               // 64 rows x 64 dims, swizzled
constexpr u32 kTileBytes = kTileGroup * (kDim / kGroupDims);
constexpr u32 kQChunk = kHeads * 32;                   // 64 heads x 16 dims in memory
constexpr u32 kProbsBytes = kHeads * 128;              // 64 heads x 64 rows, swizzled
constexpr u32 kSmemQ = 0;                              // [kSharedSteps / 4 groups][64 heads][128]
constexpr u32 kSmemTiles = kSmemQ + kSharedSteps / 4 * kTileGroup;  // [kSlots][8][64 rows][128]
constexpr u32 kSmemP = kSmemTiles + kSlots * kTileBytes;            // [kProbSlots][64 heads][128]
constexpr u32 kSmemAlpha = kSmemP + kProbSlots * kProbsBytes;       // float [kProbSlots][64]
constexpr u32 kSmemInverse = kSmemAlpha + kProbSlots * kHeads * 4;  // float [kItemSlots][64]
constexpr u32 kSmemCosSin = kSmemInverse + kItemSlots * kHeads * 4; // float [kItemSlots][64]
constexpr u32 kSmemRaised = kSmemCosSin + kItemSlots * kRopeDims * 4;  // u32 [kProbSlots][4 warps]
constexpr u32 kSmemBars = kSmemRaised + kProbSlots * 16;
constexpr u32 kBarTileFull = kSmemBars;                // [kSlots]
constexpr u32 kBarTileFree = kBarTileFull + kSlots * 8;
constexpr u32 kBarProbsFull = kBarTileFree + kSlots * 8;            // [kProbSlots]
constexpr u32 kBarProbsFree = kBarProbsFull + kProbSlots * 8;
constexpr u32 kBarQFull = kBarProbsFree + kProbSlots * 8, kBarQFree = kBarQFull + 8;
constexpr u32 kSmemBytes = kBarQFree + 8;
static_assert(kSmemBytes <= 232448, "an SM gives a CTA 227 KB");

DEVICE float load_shared_float(u32 a) { return __uint_as_float(load_shared(a)); }
DEVICE void store_shared_float(u32 a, float v) { store_shared(a, __float_as_uint(v)); }

// Hides how a descriptor was made: the compiler may add every offset to its constant part ahead
// of the loop, and keep tens of descriptors in registers.
DEVICE u64 opaque(u64 descriptor) {
  asm volatile("" : "+l"(descriptor));
  return descriptor;
}

// Blocks of an item with `rows` columns: at least one, so that every role meets every item.
DEVICE int blocks_of(int rows) { return max(1, (rows + kBlock - 1) / kBlock); }

// Where a thread stands in its role.
struct Lane {
  int warp;      // in the warpgroup, 0..3
  int lane;      // 0..31
  int row, col;  // lane / 4 and lane % 4: its place in a wgmma fragment

  DEVICE explicit Lane(int warp_) : warp(warp_), lane(lane_id()), row(lane >> 2), col(lane & 3) {}
};

// The token of a work item, and its first head. head_tiles is 1 or 2.
DEVICE int token_of(const Params& p, int item) { return item >> (p.head_tiles - 1); }
DEVICE int first_head(const Params& p, int item) { return (item & (p.head_tiles - 1)) * kHeads; }
// Columns of an item's index list that count.
DEVICE int rows_of(const Params& p, int item) {
  const int rows = p.lengths ? load_global(p.lengths + token_of(p, item)) : p.topk;
  return __shfl_sync(~0u, min(max(rows, 0), p.topk), 0);
}
