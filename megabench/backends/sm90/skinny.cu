// Grouped product of MXFP8 operands for a handful of tokens: the weight streams from memory
// straight into the registers of mma.sync, with no ring to fill first.
//
// A CTA has tiles of 16 weight rows, a warp a piece of 256 columns: it takes the piece through the
// tiles, two words of 128 columns ahead, with its activations in registers. Codes become f16 as
// they are, and the sums of a block of 32 columns are scaled in float32.
//
// Lane 4g + c has 16 codes of rows g and g + 8, columns 16c.. of 64, whose word i makes the
// fragments of step i: lanes of c < 2 have the first block, the others the second. Up to four
// tokens, mma's eight columns are tokens x blocks: a lane's activations of the other block are
// zeros. Beyond that each block has steps of its own.
#include "mxfp8.cuh"

#ifndef TOKENS
#error "compile with -DTOKENS=4 or 8, the most tokens"
#endif

constexpr int kTokens = TOKENS;
constexpr bool kBothBlocks = kTokens == 4;  // in one step
constexpr int kRows = 16, kWarps = 16, kThreads = 32 * kWarps;
constexpr int kPieceWords = 2, kPieceColumns = kPieceWords * kColumns;
constexpr int kSum = kRows * kTokens + 16;  // floats of a tile's piece, apart by half the banks

struct Params {
  const u8 *x, *w;                        // e4m3 [tokens][groups][columns], [groups][rows][columns]
  const u32 *x_scale, *w_scale;           // ue8m0 x 4, one word for 128 columns
  u16* out;                               // bf16 [tokens][groups][rows]
  u32 x_token, x_group;                   // strides: bytes, words or elements
  u32 w_row, w_group;
  u32 x_scale_token, x_scale_group, x_scale_word;
  u32 w_scale_row, w_scale_group, w_scale_word;
  u32 out_token, out_group;
  int tokens;
  int words;                              // columns / 128
  int row_tiles, tiles_each;              // of a group, of a CTA
  int pieces, wide, teams;                // of a row, at once, warps that share a piece's tiles
};

DEVICE void load16(const u8* p, u32 (&v)[4]) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(p));
}
DEVICE void load16_once(const u8* p, u64 policy, u32 (&v)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(p), "l"(policy));
}
DEVICE u32 load4(const u32* p) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
// Four e4m3 codes -> f16: the first two and the last two.
DEVICE void to_f16(u32 codes, u32& low, u32& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}
DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE void mma(float (&d)[4], const u32 (&low)[2], const u32 (&high)[2], u32 x_low, u32 x_high) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(low[0]), "r"(low[1]), "r"(high[0]), "r"(high[1]), "r"(x_low), "r"(x_high));
}
// 2^(byte q - 127): for byte 0 a subnormal
DEVICE float scale_of(u32 word, int q) {
  const u32 bits = (q == 3 ? word >> 1 : word << (23 - 8 * q)) & 0x7f800000u;
  return __uint_as_float(max(bits, 0x00400000u));
}

struct Lane {
  int g, c;
  DEVICE Lane() : g(threadIdx.x % 32 >> 2), c(threadIdx.x & 3) {}
  DEVICE int token() const { return kBothBlocks ? g & 3 : g; }               // of its activations
  DEVICE int sum_token() const { return kBothBlocks ? 2 * (c & 1) : 2 * c; }  // first of its sums
  DEVICE bool in_block() const { return !kBothBlocks || g >> 2 == c >> 1; }
  DEVICE int scale_bit() const { return kBothBlocks ? 8 * (c >> 1) : 0; }     // of its block's
};

struct Word {                             // 128 columns of the lane's two rows
  u32 w[2][2][4], scale[2];               // [64 columns][row, row + 8]
};

struct Activations {                      // of a piece
  u32 low[kPieceWords][2][4], high[kPieceWords][2][4], scale[kPieceWords][2];

  // Tokens past the last are copies of it: their sums go nowhere.
  DEVICE void load(const Params& p, const Lane& lane, int group, int piece) {
    const bool both = (piece + 1) * kPieceWords <= p.words;
    const int token = min(lane.token(), p.tokens - 1);
    const u8* x =
        p.x + (group * p.x_group + token * p.x_token + piece * kPieceColumns + 16 * lane.c);
#pragma unroll
    for (int j = 0; j < kPieceWords; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 4; i++) low[j][h][i] = 0;
        if ((j == 0 || both) && lane.in_block()) load16(x + j * kColumns + 64 * h, low[j][h]);
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
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) to_f16(low[j][h][i], low[j][h][i], high[j][h][i]);
#pragma unroll
      for (int e = 0; e < 2; e++) scale[j][e] >>= lane.scale_bit();
    }
  }
};

// acc: [row, row + 8][token, token + 1]
DEVICE void multiply(const Lane& lane, const Word& word, const Activations& x, int j,
                     float (&acc)[4]) {
  constexpr int kSteps = kBothBlocks ? 1 : 2;
  const u32 scale[2] = {word.scale[0] >> lane.scale_bit(), word.scale[1] >> lane.scale_bit()};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float sum[kSteps][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 low[2], high[2];
#pragma unroll
      for (int half = 0; half < 2; half++) to_f16(word.w[h][half][i], low[half], high[half]);
      if constexpr (kBothBlocks) {
        mma(sum[0], low, high, x.low[j][h][i], x.high[j][h][i]);
      } else {
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const u32 mine = lane.c >> 1 == b ? 0x3c003c00u : 0;  // ones or zeros
          mma(sum[b], low, high, mul_f16x2(x.low[j][h][i], mine), mul_f16x2(x.high[j][h][i], mine));
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kSteps; b++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        acc[i] = fmaf(sum[b][i] * scale_of(scale[i / 2], 2 * h + b),
                      scale_of(x.scale[j][i % 2], 2 * h + b), acc[i]);
  }
}

struct Stream {                           // of a warp: its pieces, each through its tiles
  const Params& p;
  u64 policy;
  u32 w_first, scale_first, w, scale;
  int tiles, team, piece, tile;

  DEVICE Stream(const Params& params, const Lane& lane, int group, int first_tile)
      : p(params), policy(once_policy()), tiles(min(p.tiles_each, p.row_tiles - first_tile)),
        piece(threadIdx.x / 32) {
    for (team = 0; piece >= p.wide; team++) piece -= p.wide;
    if (team >= min(p.teams, tiles)) piece = p.pieces;
    const u32 row = (first_tile + team) * kRows + lane.g;
    w_first = group * p.w_group + row * p.w_row + 16 * lane.c;
    scale_first = group * p.w_scale_group + row * p.w_scale_row;
    start();
  }
  DEVICE void start() {
    tile = team;
    w = w_first + piece * kPieceColumns;
    scale = scale_first + piece * kPieceWords * p.w_scale_word;
  }
  DEVICE void advance() {
    tile += p.teams;
    w += p.teams * kRows * p.w_row;
    scale += p.teams * kRows * p.w_scale_row;
    if (tile >= tiles) piece += p.wide, start();
  }
  DEVICE void fetch(int j, Word& word) const {
    if (piece >= p.pieces || (j > 0 && piece * kPieceWords + j >= p.words)) return;
    const u8 *up = p.w + w, *down = p.w + (w + 8 * p.w_row);
    const u32 at = scale + j * p.w_scale_word;
    word.scale[0] = load4(p.w_scale + at);
    word.scale[1] = load4(p.w_scale + (at + 8 * p.w_scale_row));
#pragma unroll
    for (int h = 0; h < 2; h++) {
      load16_once(up + j * kColumns + 64 * h, policy, word.w[h][0]);
      load16_once(down + j * kColumns + 64 * h, policy, word.w[h][1]);
    }
  }
};

// Four threads add the pieces of two rows of a token, always in the same order.
DEVICE void store(const Params& p, const float* sums, int group, int first_tile, int tiles) {
  const int part = threadIdx.x % 4, pair = threadIdx.x / 4 % (kRows / 2) * 2;
#pragma unroll 1
  for (int n = threadIdx.x / (2 * kRows); n < tiles * kTokens; n += kThreads / (2 * kRows)) {
    const int token = n % kTokens, tile = n / kTokens;
    const float* from = sums + tile * p.pieces * kSum + token * kRows + pair;
    float low = 0, high = 0;
    if (token < p.tokens) {
#pragma unroll 4
      for (int i = part; i < p.pieces; i += 4) {
        const float2 v = *(const float2*)(from + i * kSum);
        low += v.x, high += v.y;
      }
    }
#pragma unroll
    for (int m = 1; m < 4; m *= 2) {
      low += __shfl_xor_sync(~0u, low, m);
      high += __shfl_xor_sync(~0u, high, m);
    }
    if (part == 0 && token < p.tokens)
      *(u32*)(p.out + (token * p.out_token + group * p.out_group +
                       (first_tile + tile) * kRows + pair)) = pack_bf16(low, high);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_skinny_product(const __grid_constant__ Params p) {
  extern __shared__ float sums[];         // [tile][piece][token][row]
  const Lane lane;
  const int group = blockIdx.y, first_tile = blockIdx.x * p.tiles_each;
  Stream ahead(p, lane, group, first_tile);
  int piece = ahead.piece, tile = ahead.tile;
  Activations x;
  Word words[kPieceWords];
  ahead.fetch(0, words[0]);               // before anything else waits in memory's queues
  if (piece < p.pieces) x.load(p, lane, group, piece);
  ahead.fetch(1, words[1]);
  x.convert(lane);
#pragma unroll 1
  while (piece < p.pieces) {
    ahead.advance();
    float acc[4] = {};
#pragma unroll
    for (int j = 0; j < kPieceWords; j++) {
      const Word word = words[j];
      ahead.fetch(j, words[j]);
      if (j == 0 || piece * kPieceWords + j < p.words) multiply(lane, word, x, j, acc);
    }
    if constexpr (kBothBlocks) {
#pragma unroll
      for (int i = 0; i < 4; i++) acc[i] += __shfl_xor_sync(~0u, acc[i], 2);
    }
    float* to = sums + (tile * p.pieces + piece) * kSum + lane.sum_token() * kRows + lane.g;
    if (!kBothBlocks || lane.c < 2) {
#pragma unroll
      for (int i = 0; i < 4; i++) to[i % 2 * kRows + i / 2 * 8] = acc[i];
    }
    if (ahead.piece != piece && ahead.piece < p.pieces) {
      x.load(p, lane, group, ahead.piece);
      x.convert(lane);
    }
    piece = ahead.piece, tile = ahead.tile;
  }
  __syncthreads();
  store(p, sums, group, first_tile, ahead.tiles);
}
