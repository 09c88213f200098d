// The skinny product's parameters (mirrored by skinny_launch.py), which lane has what, and its
// arithmetic: codes -> f16 fragments, mma.sync, scaled sums.
//
// A lane's load is 16 codes of a row, whose word i makes the fragments of step i. mma's eight
// columns tell apart whose products they are: 8 tokens; or 4 tokens x the 2 blocks of 64 columns;
// or 2 tokens x 2 blocks x the halves of 128 columns, for loads of whole lines of memory, where a
// row of the weight fills two of mma's. Lane 4g + c has columns 16c.. of 64, so lanes of c < 2 have
// the first block, the others the second. Activations that are not a column's are zeros.
#pragma once

#include "skinny_math.cuh"

#ifndef TOKENS
#error "compile with -DTOKENS=2, 4 or 8, the most tokens"
#endif

constexpr int kTokens = TOKENS;
constexpr bool kBothBlocks = kTokens < 8;   // in one step, as columns
constexpr bool kWholeLines = kTokens == 2;  // and the halves
constexpr int kRows = 16;
constexpr int kSum = kRows * kTokens + 16;  // floats of a tile's piece, apart by half the banks

struct Lane {
  int g, c;
  DEVICE Lane() : g(threadIdx.x % 32 >> 2), c(threadIdx.x & 3) {}
  DEVICE int row() const { return kWholeLines ? g >> 1 : g; }
  DEVICE int column() const { return 16 * c + (kWholeLines ? 64 * (g & 1) : 0); }
  // of its activations, column g of mma
  DEVICE int x_token() const { return g % kTokens; }
  DEVICE int x_column() const { return 16 * c + (kWholeLines ? 64 * (g >> 1 & 1) : 0); }
  DEVICE bool x_block() const { return !kBothBlocks || g >> 2 == c >> 1; }
  // of its sums, columns 2c and 2c + 1
  DEVICE int sum_token() const { return 2 * c % kTokens; }
  DEVICE int scale_bit() const {
    return kBothBlocks ? 8 * (c >> 1) + (kWholeLines ? 16 * (c & 1) : 0) : 0;
  }
};

constexpr int kXGroups = kWholeLines ? 1 : 2;  // of 64 columns a lane, in 128
constexpr int kRowGroups = kWholeLines ? 2 : 1;  // of 8 rows

struct Word {                             // 128 columns: 2 groups of rows or columns
  u32 w[2][2][4], scale[kRowGroups][2];   // [group][upper or lower rows]
};
DEVICE int row_of(int group, int lower) { return kWholeLines ? 8 * group + 4 * lower : 8 * lower; }
DEVICE int column_of(int group) { return kWholeLines ? 0 : 64 * group; }

struct Activations {                      // of a piece
  u32 low[kPieceWords][kXGroups][4], high[kPieceWords][kXGroups][4], scale[kPieceWords][2];

  // Tokens past the last are copies of it: their sums go nowhere.
  DEVICE void load(const Params& p, const Lane& lane, int group, int piece) {
    const bool both = (piece + 1) * kPieceWords <= p.words;
    const int token = min(lane.x_token(), p.tokens - 1);
    const u8* x =
        p.x + (group * p.x_group + token * p.x_token + piece * kPieceColumns + lane.x_column());
#pragma unroll
    for (int j = 0; j < kPieceWords; j++)
#pragma unroll
      for (int m = 0; m < kXGroups; m++) {
#pragma unroll
        for (int i = 0; i < 4; i++) low[j][m][i] = 0;
        if ((j == 0 || both) && lane.x_block())
          load16(x + j * kColumns + column_of(m), low[j][m]);
      }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const u32 at = group * p.x_scale_group + piece * kPieceWords * p.x_scale_word +
                     min(lane.sum_token() + e, p.tokens - 1) * p.x_scale_token;
#pragma unroll
      for (int j = 0; j < kPieceWords; j++)
        scale[j][e] = j == 0 || both ? load4(p.x_scale + (at + j * p.x_scale_word)) : 0;
    }
  }
  DEVICE void convert(const Lane& lane) {
#pragma unroll
    for (int j = 0; j < kPieceWords; j++) {
#pragma unroll
      for (int m = 0; m < kXGroups; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) to_f16(low[j][m][i], low[j][m][i], high[j][m][i]);
#pragma unroll
      for (int e = 0; e < 2; e++) scale[j][e] >>= lane.scale_bit();
    }
  }
};

// acc: [group of rows][upper, lower][token, token + 1]
DEVICE void multiply(const Lane& lane, const Word& word, const Activations& x, int j,
                     float (&acc)[kRowGroups][4]) {
  constexpr int kSteps = kBothBlocks ? 1 : 2;
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const int rows = m % kRowGroups, columns = m % kXGroups;
    float sum[kSteps][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 low[2], high[2];
#pragma unroll
      for (int lower = 0; lower < 2; lower++)
        to_f16(word.w[m][lower][i], low[lower], high[lower]);
      const u32 x_low = x.low[j][columns][i], x_high = x.high[j][columns][i];
      if constexpr (kBothBlocks) {
        mma(sum[0], low, high, x_low, x_high);
      } else {
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const u32 mine = lane.c >> 1 == b ? 0x3c003c00u : 0;  // ones or zeros
          mma(sum[b], low, high, mul_f16x2(x_low, mine), mul_f16x2(x_high, mine));
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kSteps; b++) {
      const int q = 2 * columns + b;      // of the blocks from the lane's first
#pragma unroll
      for (int i = 0; i < 4; i++)
        acc[rows][i] = fmaf(sum[b][i] * scale_of(word.scale[rows][i / 2] >> lane.scale_bit(), q),
                            scale_of(x.scale[j][i % 2], q), acc[rows][i]);
    }
  }
}

// A warp's sums of a tile's piece into shared memory, [token][row].
DEVICE void keep(const Lane& lane, float (&acc)[kRowGroups][4], float* sums) {
  if constexpr (kWholeLines) {
    // The lanes of a row's four blocks add them: each ends with one row of two tokens.
    const bool second = lane.c >> 1, lower = lane.g & 1;
    float v[4], total[2];
#pragma unroll
    for (int i = 0; i < 4; i++)
      v[i] = (second ? acc[kRowGroups - 1][i] : acc[0][i]) +
             __shfl_xor_sync(~0u, second ? acc[0][i] : acc[kRowGroups - 1][i], 2);
#pragma unroll
    for (int e = 0; e < 2; e++)
      total[e] = (lower ? v[2 + e] : v[e]) + __shfl_xor_sync(~0u, lower ? v[e] : v[2 + e], 5);
    if ((lane.c & 1) == (lane.g & 1)) {
#pragma unroll
      for (int e = 0; e < 2; e++) sums[e * kRows + row_of(second, lower) + lane.row()] = total[e];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if constexpr (kBothBlocks) acc[0][i] += __shfl_xor_sync(~0u, acc[0][i], 2);
    if (!kBothBlocks || lane.c < 2) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        sums[(lane.sum_token() + i % 2) * kRows + row_of(0, i / 2) + lane.row()] = acc[0][i];
    }
  }
}
