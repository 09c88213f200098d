// The grouped MXFP8 product: launch parameters (mirrored by product_launch.py), tile constants, the
// shared-memory plan.
#pragma once

#include "mxfp8.cuh"
#include "ring.cuh"
#include "wgmma_registers.cuh"

#ifndef TOKENS
#define TOKENS 128  // tokens of a tile: wgmma's N, 16 or more
#endif
#ifndef SPLIT
#define SPLIT 1     // CTAs of a cluster, which share a tile's columns
#endif
constexpr int kTokens = TOKENS, kSplit = SPLIT;
constexpr int kRows = 128;   // weight rows of a tile, 64 a warpgroup
constexpr bool kWide = kTokens == 128;
// Warpgroups
constexpr int kRowGroups = kRows / 64, kConvertGroups = kWide ? 2 : 1, kGroup = 128;
constexpr int kMathThreads = kRowGroups * kGroup, kConvertThreads = kConvertGroups * kGroup,
              kThreads = kMathThreads + kConvertThreads + kGroup;
constexpr int kMathRegisters = kWide ? 144 : 176, kConvertRegisters = kWide ? 72 : 96,
              kLoadRegisters = 40;
static_assert(kRowGroups * kMathRegisters + kConvertGroups * kConvertRegisters + kLoadRegisters <=
                  65536 / kThreads / 8 * 8 * (kThreads / kGroup),
              "what a CTA is launched with");
constexpr u32 kSharedBytes = 232448;

struct Params {
  TensorMap x_map, w_map;  // of o.x and o.w, in boxes of a stage: 128 columns
  Operands o;
  int token_tiles;
  int share;               // words of columns of a CTA
  int unused[10];          // the maps' alignment
};

// ---- shared memory, bytes. Rings of stages of 128 columns:
constexpr int kBuffers = kWide ? 3 : 4, kXStages = kWide ? 3 : 4, kWStages = 4;
constexpr u32 kOperandBytes = kTokens * kColumns * 2;  // activations, bf16 [2][tokens][64], swizzled
constexpr u32 kXScales = kTokens * kColumns,           // their codes, swizzled, then their scales
              kXBytes = kXScales + 1024;
constexpr u32 kWScales = kRows * kColumns, kWBytes = kWScales + 1024;  // the weight's
constexpr u32 kSmemX = kBuffers * kOperandBytes, kSmemW = kSmemX + kXStages * kXBytes,
              kRingsEnd = kSmemW + kWStages * kWBytes;
// Afterwards, where these were: the tile's sums in rows of kPitch bytes, which keeps fragments
// apart, and those that the other ranks of a cluster have for this rank's part of the tokens.
constexpr int kOwnTokens = kTokens / kSplit;
constexpr u32 kPitch = kRows * 4 + 16, kSumBytes = kOwnTokens * kPitch,
              kSmemOthers = kTokens * kPitch, kSumsEnd = kSmemOthers + (kSplit - 1) * kSumBytes;
constexpr u32 kSmemBars = kRingsEnd > kSumsEnd ? kRingsEnd : kSumsEnd;
constexpr u32 kBarX = kSmemBars, kBarXFree = kBarX + 8 * kXStages, kBarW = kBarXFree + 8 * kXStages,
              kBarWFree = kBarW + 8 * kWStages, kBarOperand = kBarWFree + 8 * kWStages,
              kBarOperandFree = kBarOperand + 8 * kBuffers,
              kBarOthers = kBarOperandFree + 8 * kBuffers, kSmemBytes = kBarOthers + 8;
constexpr int kFullArrivals = 33;  // on a ring's barrier: a lane for the box, each for its scales
static_assert(kSmemBytes <= kSharedBytes, "an SM gives a CTA 227 KB");
using XRing = Ring<kXStages>;
using WRing = Ring<kWStages>;
using OperandRing = Ring<kBuffers>;

// A CTA's part: its tile, and its columns in words of 128. The grid is [row tiles x ranks] of
// [groups x token tiles], so that CTAs that share activations are neighbours.
struct Part {
  int group, token, row;
  u32 rank;
  int first, last;
  DEVICE explicit Part(const Params& p) {
    rank = kSplit > 1 ? cluster_rank() : 0;
    row = blockIdx.x / kSplit * kRows;
    group = blockIdx.y, token = 0;
    if (p.token_tiles > 1) {
      group = blockIdx.y / p.token_tiles;
      token = (blockIdx.y - group * p.token_tiles) * kTokens;
    }
    first = rank * p.share;
    last = min(first + p.share, p.o.words);
  }
};

enum NamedBarrier { kBarAll, kBarMath };

// The whole cluster is here. Waits for no copies and orders no stores.
DEVICE void meet() {
  if constexpr (kSplit > 1) cluster_meet();
  else bar_sync(kBarAll, kThreads);
}

// Barriers that this thread initialised exist for the copy engine and the cluster.
DEVICE void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_async_proxy();
}

// Rows that a quarter of a warp reads lie four apart: the swizzle puts their halves into different
// banks.
DEVICE int spread(int row) { return (row & 1) << 2 | row >> 1; }
