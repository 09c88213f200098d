// The product with a bf16 weight, for many tokens: parameters (mirrored by dense_launch.py), tile
// constants and the shared-memory plan.
#pragma once

#include "mxfp8.cuh"
#include "ring.cuh"
#include "wgmma_registers.cuh"

#ifndef WIDTH
#define WIDTH 256  // weight rows of a tile, wgmma's N: 128 or 256
#endif
constexpr int kWidth = WIDTH, kPieceRows = 256;
constexpr int kTokens = 128;              // of a tile: wgmma's M, 64 a math warpgroup
constexpr int kGroup = 128, kThreads = 3 * kGroup;
constexpr int kMathRegisters = 232, kLoadRegisters = 40;
constexpr int kPieceColumns = 64;         // 128-byte rows of bf16
constexpr u32 kPieceBytes = kPieceRows * kPieceColumns * 2;
constexpr u32 kSlotBytes = kWidth * kPieceColumns * 2;
constexpr u32 kSharedBytes = 232448;
constexpr int kSlots = (kSharedBytes - 1024) / kSlotBytes;
constexpr u32 kBarFull = kSlots * kSlotBytes, kBarFree = kBarFull + 8 * kSlots;
static_assert(kBarFree + 8 * kSlots <= kSharedBytes, "an SM gives a CTA 227 KB");

struct Params {
  const u8* x;             // e4m3 [tokens][groups][columns]
  const u8* w;             // bf16 pieces [groups][rows / 256][columns / 64][256][64], as
                           // dense_launch.py lays them out: a wgmma operand each
  const u32* x_scale;      // ue8m0 x 4, one word for 128 columns
  u16* out;                // bf16 [tokens][groups][rows]
  i64 x_token, x_group;    // strides: bytes, words or elements
  i64 x_scale_token, x_scale_group, x_scale_word;
  i64 out_token, out_group;
  int tokens;
  int words;               // columns / 128
  int row_tiles, token_tiles, tiles;
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
