// The product with a bf16 weight, for many tokens: parameters (mirrored by dense_launch.py), tile
// constants and the shared-memory plan.
#pragma once

#include "mxfp8.cuh"
#include "ring.cuh"
#include "wgmma_registers.cuh"

constexpr int kWidth = 256;               // weight rows of a tile: wgmma's N
constexpr int kTokens = 128;              // of a tile: wgmma's M, 64 a math warpgroup
constexpr int kGroup = 128, kThreads = 3 * kGroup;
constexpr int kMathRegisters = 232, kLoadRegisters = 40;
constexpr int kSlabColumns = 64;          // of the weight's pieces: 128-byte rows of bf16
constexpr u32 kSharedBytes = 232448;
constexpr u32 kSlabBytes = kWidth * kSlabColumns * 2;
constexpr u32 kRawBytes = kTokens * kColumns, kScaleBytes = kTokens * 4;
constexpr int kStages = 3;                // of quantized activations, 128 columns each
constexpr int kSlabs = (kSharedBytes - 1024 - kStages * (kRawBytes + kScaleBytes)) / kSlabBytes;
constexpr u32 kSmemRaw = kSlabs * kSlabBytes;
constexpr u32 kSmemScales = kSmemRaw + kStages * kRawBytes;
constexpr u32 kSmemBars = kSmemScales + kStages * kScaleBytes;
constexpr u32 kBarFull = kSmemBars, kBarFree = kBarFull + 8 * kStages,
              kBarSlabFull = kBarFree + 8 * kStages, kBarSlabFree = kBarSlabFull + 8 * kSlabs;
static_assert(kBarSlabFree + 8 * kSlabs <= kSharedBytes, "an SM gives a CTA 227 KB");

struct Params {
  TensorMap x;             // e4m3 [tokens][groups][columns], boxes of kTokens x kColumns
  const u8* w;             // bf16 pieces [groups][rows / kWidth][columns / 64], as dense_launch.py
                           // lays them out: a wgmma operand each
  const u32* x_scale;      // ue8m0 x 4, one word for 128 columns
  u16* out;                // bf16 [tokens][groups][rows]
  i64 x_scale_token, x_scale_group, x_scale_word;  // strides: words or elements
  i64 out_token, out_group;
  int tokens;
  int words;               // columns / 128
  int row_tiles, token_tiles, tiles;
  int unused[11];          // the map's alignment
};

struct Tile {
  int group, token, row_tile;
  DEVICE Tile(const Params& p, int tile) {
    const int per_group = p.row_tiles * p.token_tiles;
    group = tile / per_group;
    const int rest = tile - group * per_group;
    token = rest / p.row_tiles * kTokens;
    row_tile = rest % p.row_tiles;
  }
};
