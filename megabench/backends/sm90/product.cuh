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
constexpr int kBoxRows = 32; // of a tensor copy: several are under way together
constexpr bool kWide = kTokens == 128;
// Warpgroups
constexpr int kRowGroups = kRows / 64, kConvertGroups = kWide ? 2 : 1, kGroup = 128;
constexpr int kMathThreads = kRowGroups * kGroup, kConvertThreads = kConvertGroups * kGroup,
              kThreads = kMathThreads + kConvertThreads + kGroup;
constexpr int kMathRegisters = kWide ? 144 : 176, kConvertRegisters = kWide ? 72 : 96,
              kLoadRegisters = kWide ? 48 : 56;
static_assert(kRowGroups * kMathRegisters + kConvertGroups * kConvertRegisters + kLoadRegisters <=
                  65536 / kThreads / 8 * 8 * (kThreads / kGroup),
              "what a CTA is launched with");
constexpr u32 kSharedBytes = 232448;

struct Params {
  TensorMap x_map, w_map;  // of o.x and o.w, in boxes of a stage: 128 columns; kTokens, kBoxRows
  Operands o;
  int token_tiles;
  int share;               // words of columns of a CTA
  int unused[10];          // the maps' alignment
};

// ---- shared memory, bytes: two rings of stages of 128 columns. A stage holds its barriers, too, so
// that one place in a register finds it all.
constexpr int kXStages = kWide ? 3 : 4, kWStages = 4;
// Activations: wgmma's operand [2][tokens][64] and their codes, both swizzled; scales, a byte for 32
// columns: [4][16][tokens / 16], so that those of every 16th token are neighbours
constexpr u32 kXCodes = kTokens * kColumns * 2, kXScales = kXCodes + kTokens * kColumns,
              kXFull = kXScales + 512, kXCopied = kXFull + 8, kOperandFull = kXFull + 16,
              kOperandFree = kXFull + 24, kXBytes = kXScales + 1024;
// The weight: codes, swizzled, scales, a word a row
constexpr u32 kWScales = kRows * kColumns, kWFull = kWScales + 512, kWCopied = kWFull + 8,
              kWFree = kWFull + 16, kWBytes = kWScales + 1024;
constexpr u32 kSmemW = kXStages * kXBytes;
// Afterwards, in the activations' stages: what the other ranks of a cluster have of the sums that a
// rank adds and stores, kOwn of each thread of the math warps, in kParts parts with a barrier each.
constexpr int kOwn = kTokens / 2 / kSplit, kParts = kOwn >= 16 ? 4 : 1;
constexpr u32 kSumBytes = kOwn * 4 * kMathThreads, kPartBytes = kSumBytes / kParts;
// The first part of two ranks has a place that is nothing else's: it is sent before they meet.
constexpr bool kEarly = kSplit == 2 && kParts > 1;
static_assert(kSplit == 1 || ((kSplit - 2) / kXStages + 1) * kSumBytes <= kXScales,
              "sums leave the stages' barriers alone");
constexpr u32 kBarOthers = kSmemW + kWStages * kWBytes, kAgain = kBarOthers + 8 * kParts,
              kFirstPart = (kAgain + 8 + 15) / 16 * 16,
              kSmemBytes = kFirstPart + (kEarly ? kPartBytes : 0);
constexpr int kLanes = 32;
constexpr int kFactorsArrive = 1;  // a lane of the warp that makes factors (every_lane.py: all)
constexpr int kFullArrivals = 1 + kFactorsArrive;  // and one for the boxes
static_assert(kSmemBytes <= kSharedBytes, "an SM gives a CTA 227 KB");

using XPlace = Place<0, kXStages, kXBytes>;
using WPlace = Place<kSmemW, kWStages, kWBytes>;

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

enum NamedBarrier { kBarAll };

// The CTA is here, with its barriers initialised.
DEVICE void meet() {
  if constexpr (kSplit > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  bar_sync(kBarAll, kThreads);
}

// A block was met that f16 cannot hold: all ranks have to go over their columns again, in bf16.
DEVICE void ask_again(u32 smem) {
  asm volatile("st.relaxed.cta.shared::cta.u32 [%0], 1;" ::"r"(smem + kAgain) : "memory");
}
// All roles of the cluster are through with their columns. Whether to go over them again: warps
// that asked tell all ranks. The barrier orders no stores, which would take 600 cycles more.
// `before` runs, in a cluster, when every rank has its barriers; others may be at their columns.
template <class Before> DEVICE bool again(u32 smem, Before before) {
  if constexpr (kSplit > 1) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // of meet()
    before();
    if (load_shared(smem + kAgain) != 0) {
#pragma unroll 1
      for (u32 rank = 0; rank < kSplit; rank++)
        asm volatile("st.relaxed.cluster.shared::cluster.u32 [%0], 1;" ::"r"(
                         map_to_rank(smem + kAgain, rank))
                     : "memory");
      asm volatile("fence.acq_rel.cluster;" ::: "memory");
    }
    __syncwarp();
    cluster_meet();
  } else {
    bar_sync(kBarAll, kThreads);
  }
  return load_shared(smem + kAgain) != 0;
}

DEVICE bool again(u32 smem) {
  return again(smem, [] {});
}

// Barriers that this thread initialised exist for the copy engine and the cluster.
DEVICE void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_async_proxy();
}

// Rows that a quarter of a warp reads lie four apart: the swizzle puts their halves into different
// banks.
DEVICE int spread(int row) { return (row & 1) << 2 | row >> 1; }
