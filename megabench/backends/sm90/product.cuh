// The grouped MXFP8 product: launch parameters (mirrored by product_launch.py), tile constants, the
// shared-memory plan.
#pragma once

#include "mxfp8.cuh"
#include "ring.cuh"
#include "wgmma_registers.cuh"

#ifndef TOKENS
#define TOKENS 128  // tokens of a tile: wgmma's N, 16 or more
#endif
#ifndef ROWS
#define ROWS 128    // weight rows of a tile: one or two times wgmma's M
#endif
constexpr int kTokens = TOKENS, kRows = ROWS;
// Warpgroups. Those that multiply the same rows take stages in turn.
constexpr bool kWide = kTokens == 128;
constexpr int kRowGroups = kRows / 64, kTurns = (kWide ? 2 : 4) / kRowGroups;
constexpr int kMathGroups = kRowGroups * kTurns, kConvertGroups = kWide ? 2 : 1;
constexpr int kGroup = 128, kThreads = (kMathGroups + kConvertGroups + 1) * kGroup;
constexpr int kMathRegisters = kWide ? 160 : 96, kConvertRegisters = kWide ? 56 : 48,
              kLoadRegisters = kWide ? 40 : 48;
static_assert(kMathGroups * kMathRegisters + kConvertGroups * kConvertRegisters + kLoadRegisters <=
                  65536 / kThreads / 8 * 8 * (kThreads / kGroup),
              "what a CTA is launched with");
constexpr u32 kSharedBytes = 232448;

struct Params {
  // Operands (mxfp8.cuh), flat: nested, the compiler orders the loads otherwise than was measured
  const u8* x;
  const u8* w;
  const u32* x_scale;
  const u32* w_scale;
  u16* out;
  i64 x_token, x_group;
  i64 w_row, w_group;
  i64 x_scale_token, x_scale_group, x_scale_word;
  i64 w_scale_row, w_scale_group, w_scale_word;
  i64 out_token, out_group;
  int tokens;
  int words;
  int row_tiles, token_tiles, tiles;
  int split;               // CTAs of the cluster that share a tile's columns
};

// ---- shared memory, bytes
constexpr u32 kRawBytes = (kRows + kTokens) * kColumns;  // 128-byte rows, 16-byte chunks ^ row
constexpr u32 kScaleBytes = (kRows + kTokens) * 4;
constexpr u32 kOperandBytes = kTokens * kColumns * 2;   // bf16 [2][tokens][64], swizzled
constexpr int kBuffers = 2 * kTurns;  // of activations: each turn holds one until its next stage
constexpr int kFitting =
    (kSharedBytes - 1024 - kBuffers * kOperandBytes) / (kRawBytes + kScaleBytes);
constexpr int kStages = (kFitting < 24 ? kFitting : 24) / kTurns * kTurns;  // of codes
constexpr u32 kSmemOperand = kStages * kRawBytes;
constexpr u32 kSmemScales = kSmemOperand + kBuffers * kOperandBytes;
constexpr u32 kSmemBars = kSmemScales + kStages * kScaleBytes;
constexpr u32 kBarFull = kSmemBars, kBarFree = kBarFull + 8 * kStages,
              kBarOperandFull = kBarFree + 8 * kStages,
              kBarOperandFree = kBarOperandFull + 8 * kBuffers;
constexpr u32 kSmemBytes = kBarOperandFree + 8 * kBuffers;
static_assert(kSmemBytes <= kSharedBytes && kStages >= 3, "an SM gives a CTA 227 KB");
// Partial sums, float [turns - 1][tokens][rows], lie where the operands were.
constexpr u32 kPartialPitch = (kRows + 4) * 4, kPartialBytes = kTokens * kPartialPitch;
static_assert((kTurns > 1 ? kTurns - 1 : 1) * kPartialBytes <= kSmemScales, "partial sums fit");

// A slot belongs to one turn, which sees each of its phases: a waiter that skipped one could take
// an old phase for the next.
static_assert(kStages % kTurns == 0 && kBuffers % kTurns == 0, "turns own their slots");
using StageRing = Ring<kStages>;
using OperandRing = Ring<kBuffers>;

// A tile. Row tiles are neighbours: they share activations in L2.
struct Tile {
  int group, token, row;
  DEVICE Tile(const Params& p, int tile) {
    const int per_group = p.row_tiles * p.token_tiles;
    group = tile / per_group;
    const int rest = tile - group * per_group;
    token = rest / p.row_tiles * kTokens;
    row = rest % p.row_tiles * kRows;
  }
};

// This CTA's share of the tiles and of a tile's columns. The grid has a CTA, or a cluster, for
// every tile, so that the loops over tiles end after one.
struct Share {
  int first_tile, tile_step, first_word, last_word;
  u32 rank;
  DEVICE explicit Share(const Params& p) {
    rank = p.split > 1 ? cluster_rank() : 0;
    first_tile = blockIdx.x / p.split;
    tile_step = gridDim.x / p.split;
    first_word = rank * p.words / p.split;
    last_word = (rank + 1) * p.words / p.split;
  }
};
