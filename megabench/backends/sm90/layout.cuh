// Decode: launch parameters (mirrored by decode_launch.py), tile constants, shared-memory plan.
#pragma once

#include "wgmma.cuh"

#ifndef EXTRA_FP4
#define EXTRA_FP4 0  // 1: the extra cache holds 288-byte NVFP4 records
#endif
constexpr bool kExtraFp4 = EXTRA_FP4;
#ifndef CLUSTERED
#define CLUSTERED 0  // 1: launched as clusters that share one item each, 0: persistent over items
#endif
constexpr bool kClustered = CLUSTERED;
constexpr int kHeads = 64;        // heads of one work item: one wgmma M (or N) of 64
constexpr int kDim = 512;         // K and V are the same 512-wide row
constexpr int kBlock = 64;        // KV rows of one tile
constexpr int kGroupDims = 64;    // dims of a 128-byte swizzled tile row
constexpr int kOutChunk = 32;     // dims under one output scale
constexpr int kOutChunks = kDim / kOutChunk;
constexpr int kWvGroup = 8;       // heads of one wo_a group
constexpr int kGroups = kHeads / kWvGroup;
constexpr int kRopeDims = 64;     // the last dims of a row
constexpr int kStep = 16;         // KV rows of one wgmma of P V; a tile is freed step by step
constexpr int kSteps = kBlock / kStep;
constexpr int kLookahead = 5;     // blocks from an offset to its scores
constexpr int kPrefetch = 3;      // blocks from an L2 prefetch to the probabilities (< kLookahead)
constexpr int kSlots = 8;         // blocks in the offset ring (> kLookahead + 2)

// Code of two record types must be short (see decode.cu).
constexpr bool kShortCode = kExtraFp4;

constexpr int kConvertRegisters = 80, kScoreRegisters = 112, kOutputRegisters = 160;
constexpr int kThreads = 512, kRoleThreads = 128;
enum Role { kConvertRole, kScoreRole, kOutputRole };  // a warpgroup each, the last two

// One CTA in a cluster of `split` works on its share of an item's blocks. `replicas` clusters work
// on one item, all on all of it, and each finishes a part of the output.
struct Params {
  const u16* q;              // bf16 [s_q][32 chunks][padded heads][16]
  const u8* pool[2];         // sliding-window cache, extra cache (or null)
  const int* indices[2];     // slot ids [s_q][topk]
  const int* lengths[2];     // valid columns per token, or null for topk
  const int* positions;      // [s_q]
  const float* cos_sin;      // [P][32 cos | 32 sin]
  const float* sink;         // [padded heads] or null
  u8* out;                   // e4m3 [s_q][groups][16 chunks][8 heads][32]
  u32* scales;               // ue8m0 x 4, word (chunk*8 + head)/4, MN-major
  float* lse;                // [s_q][padded heads]
  i64 q_stride;              // elements per token
  i64 scale_word, scale_group;  // strides in words
  u32 page[2];               // tokens per page
  u32 page_magic[2], page_shift[2];  // slot / page == slot * magic >> shift, for slot < 2^31
  u32 page_stride[2];        // in units of 16 bytes
  u32 slots[2];              // slots of the pool
  int topk[2], index_stride[2];
  int items;                 // tokens x head tiles
  int head_tiles;            // padded heads / 64
  int split;                 // CTAs per cluster
  int replicas;              // clusters per item, a power of two
  float scale_log2;          // sm_scale * log2(e)
};

// ---- records, as a converter warp stages them: data of two rows (a unit) at a time, scales of its
// 16 rows of a block at once
constexpr u32 kFp8Record = 528, kFp4Record = 288;
constexpr u32 kFp8Data = 512, kFp4Data = 256;
constexpr u32 kRowPitch = 576;    // second row of a unit: 64 mod 128, so that loads do not conflict
constexpr u32 kUnitBytes = kRowPitch + kFp8Data;
constexpr int kUnits = 4;         // units in flight per converter warp
constexpr int kUnitsPerBlock = 8;
constexpr u32 kScalePitch = 32;   // bytes of scales kept per row
constexpr u32 kScaleBytes = 16 * kScalePitch;

// ---- shared memory, bytes
constexpr u32 kTileGroup = kBlock * 128;               // 64 rows x 64 dims, swizzled
constexpr u32 kTileBytes = kTileGroup * (kDim / kGroupDims);
constexpr u32 kQChunk = kHeads * 32;                   // 64 heads x 16 dims, swizzled
constexpr u32 kSmemQ = 0;                              // [32 chunks][64 heads][32]
constexpr u32 kSmemKV = kSmemQ + kTileBytes;           // [2 tiles][8 groups][64 rows][128]
constexpr u32 kSmemP = kSmemKV + 2 * kTileBytes;       // P^T [64 rows][64 heads] bf16
constexpr u32 kSmemRaw = kSmemP + kBlock * 128;        // [4 warps][kUnits] staged data
constexpr u32 kSmemScales = kSmemRaw + 4 * kUnits * kUnitBytes;   // [4 warps][2 blocks] scales
constexpr u32 kSmemOffsets = kSmemScales + 8 * kScaleBytes;       // [kSlots][64] record / 16
constexpr u32 kSmemReduce = kSmemOffsets + kSlots * kBlock * 4;   // float [4 warps][64]
constexpr u32 kSmemDelta = kSmemReduce + 4 * kHeads * 4;          // float [64]
constexpr u32 kSmemNegRef = kSmemDelta + kHeads * 4;   // float [fp8, fp4][64]: bias - reference
constexpr u32 kSmemAlpha = kSmemNegRef + 2 * kHeads * 4;          // float [2][64]
constexpr u32 kSmemInverse = kSmemAlpha + 2 * kHeads * 4;         // float [2][64]
constexpr u32 kSmemCosSin = kSmemInverse + 2 * kHeads * 4;        // float [2][64]
constexpr u32 kSmemMeta = kSmemCosSin + 2 * kRopeDims * 4;        // u32 [kSlots]
constexpr u32 kSmemRaised = kSmemMeta + kSlots * 4;               // u32 [2]
constexpr u32 kSmemSink = kSmemRaised + 8;                        // float [128 padded heads]
constexpr u32 kSmemNextLengths = kSmemSink + 2 * kHeads * 4;      // int [4 warps][2]
constexpr u32 kSmemNextPosition = kSmemNextLengths + 32;          // int
constexpr u32 kSmemBars = kSmemNextPosition + 8;
constexpr u32 kBarTileFull = kSmemBars, kBarTileFree = kBarTileFull + 16,  // [2], [2][kSteps]
              kBarProbsFull = kBarTileFree + 64, kBarInverse = kBarProbsFull + 16,
              kBarItemDone = kBarInverse + 8, kBarQ = kBarItemDone + 8,
              kBarFirstTile = kBarItemDone;  // of a cluster, which has one item
constexpr u32 kSmemBytes = kBarQ + 8;
static_assert(kSmemBytes <= 232448, "an SM gives a CTA 227 KB");

constexpr u32 kNoRow = ~0u;       // offset of a masked row
constexpr u32 kMetaExtra = 1;     // the block comes from the extra cache
constexpr u32 kMetaLast = 2;      // last block of its item
// NVFP4 rows are held times 2^-9, so that code * scale stays inside bf16's exponents.
constexpr float kFp4Shift = 9.f, kFp4Up = 512.f, kFp4Down = 1.f / 512.f;

enum NamedBarrier { kBarStart = 1, kBarLookahead = 2, kBarScores = 3, kBarPrefetch = 4 };

// Where a thread stands in its role. Made inside a role, so that no register outlives it.
struct Lane {
  int warp;      // in the warpgroup, 0..3
  int lane;      // 0..31
  int row, col;  // lane / 4 and lane % 4: its place in a wgmma fragment

  DEVICE explicit Lane(int warp_) : warp(warp_), lane(lane_id()), row(lane >> 2), col(lane & 3) {}
};

// a / b of small numbers (a below 2^17): shorter than the exact division.
DEVICE int quotient(int a, int b) { return (int)__fdividef(a + 0.5f, (float)b); }

// A pair of parameters indexed at run time would cost a slow indexed constant load.
template <class T> DEVICE T pick(const T (&pair)[2], int extra) {
  return extra ? pair[1] : pair[0];
}

// The token of a work item, and its first head. head_tiles is 1 or 2.
DEVICE int token_of(const Params& p, int item) { return item >> (p.head_tiles - 1); }
DEVICE int first_head(const Params& p, int item) { return (item & (p.head_tiles - 1)) * kHeads; }
