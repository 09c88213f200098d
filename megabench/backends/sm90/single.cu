// Grouped product of MXFP8 operands for one token and rows of 4096 columns: as skinny.cu, with loads
// of 256 bytes of a row, no loop but over a few tiles, and nothing asked for before the weight.
//
// A CTA has kTiles tiles of 8 weight rows, a warp 256 columns of them: two tiles ahead, with its
// activations and scales in registers. A lane's load is 16 codes of a row, whose word i makes the
// fragments of step i. Lane 4g + c has columns 64 (g % 4) + 16c.., so a row of the weight fills four
// of mma's, and mma's columns tell apart the blocks of 32.
#include "skinny_math.cuh"

#ifndef TILES
#error "compile with -DTILES=1, 2, 4 or 8, the tiles of a CTA"
#endif

constexpr int kTiles = TILES, kAhead = kTiles < 2 ? kTiles : 2;
constexpr int kTileRows = 8, kRows = kTiles * kTileRows;
constexpr int kStretches = kPieceColumns / 64;
constexpr int kSum = kRows + 4;           // floats of a stretch: eight that meet in `store` lie apart

struct Lane {
  int g, c, stretch, row, bit;            // row: the first of four of a tile; bit: of its two scales
  DEVICE Lane()
      : g(threadIdx.x % 32 >> 2), c(threadIdx.x & 3), stretch(g % kStretches),
        row(4 * (g / kStretches)), bit(16 * (stretch % 2)) {}
};

struct Tile {
  u32 w[4][4];                            // [row]
  DEVICE void load(const u8* from, u32 stride, u64 policy) {
#pragma unroll
    for (int i = 0; i < 4; i++) load16_once(from + i * stride, policy, w[i]);
  }
};

// Scale words of a warp: 16 lanes have those of its first 128 columns, of four rows each.
struct Scales {
  u32 word[4];
  DEVICE void load(const Params& p, int group, int first_row, int piece) {
    const int row = threadIdx.x % 16 * 4, at = piece * kPieceWords + threadIdx.x % 32 / 16;
    if (row < kRows)
      load16((const u8*)(p.w_scale + (group * p.w_scale_group + first_row + row +
                                      at * p.w_scale_word)),
             word);
  }
  DEVICE void of(const Lane& lane, int tile, u32 (&scale)[4]) const {
    const int from = 16 * (lane.stretch / 2) + (tile * kTileRows + lane.row) / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) scale[i] = __shfl_sync(~0u, word[i], from) >> lane.bit;
  }
};

// mma's column g has block g % 2 of stretch g / 2: the other block's lanes hold zeros.
struct Activations {
  u32 low[4], high[4], scale;
  DEVICE void load(const Params& p, const Lane& lane, int group, int piece) {
#pragma unroll
    for (int i = 0; i < 4; i++) low[i] = 0;
    if (lane.g % 2 == lane.c / 2)
      load16(p.x + (group * p.x_group + piece * kPieceColumns + 64 * (lane.g / 2) + 16 * lane.c),
             low);
    const int at = piece * kPieceWords + lane.stretch / 2;
    scale = load4(p.x_scale + (group * p.x_scale_group + at * p.x_scale_word));
  }
  DEVICE void convert(const Lane& lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) to_f16(low[i], low[i], high[i]);
    scale >>= lane.bit;
  }
};

// A lane's four rows over the 64 columns of its stretch; a sum of that where the stretch is c.
DEVICE float4 multiply(const Tile& tile, const u32 (&scale)[4], const Activations& x) {
  float row[4];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    float sum[4] = {};                    // [lower row][block]
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 low[2], high[2];
#pragma unroll
      for (int lower = 0; lower < 2; lower++)
        to_f16(tile.w[2 * m + lower][i], low[lower], high[lower]);
      mma(sum, low, high, x.low[i], x.high[i]);
    }
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
      const u32 w = scale[2 * m + lower];
      row[2 * m + lower] =
          fmaf(sum[2 * lower + 1] * scale_of(w, 1), scale_of(x.scale, 1),
               sum[2 * lower] * scale_of(w, 0) * scale_of(x.scale, 0));
    }
  }
  return make_float4(row[0], row[1], row[2], row[3]);
}

// Eight threads add a row's sums, always in the same order; two rows are stored at once.
DEVICE void store(const Params& p, const float* sums, int group, int first_row) {
  const int part = threadIdx.x % 8, row = threadIdx.x / 8;
  if (row >= kRows) return;
  float sum = 0;
#pragma unroll
  for (int i = part; i < kWarps * kStretches; i += 8) sum += sums[i * kSum + row];
#pragma unroll
  for (int m = 1; m < 8; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
  const float next = __shfl_down_sync(~0u, sum, 8);
  if (part == 0 && row % 2 == 0)
    *(u32*)(p.out + (group * p.out_group + first_row + row)) = pack_bf16(sum, next);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_single_product(const __grid_constant__ Params p) {
  __shared__ alignas(16) float sums[kWarps * kStretches * kSum];  // [piece][stretch][row]
  const Lane lane;
  const int piece = threadIdx.x / 32, group = blockIdx.y, first_row = blockIdx.x * kRows;
  const u64 policy = once_policy();
  const u8* w = p.w + (group * p.w_group + (first_row + lane.row) * p.w_row +
                       piece * kPieceColumns + 64 * lane.stretch + 16 * lane.c);
  Tile ahead[kAhead];
  Scales scales;
  Activations x;
#pragma unroll
  for (int a = 0; a < kAhead; a++) ahead[a].load(w + a * kTileRows * p.w_row, p.w_row, policy);
  if (piece < p.pieces) {                 // always: keeps these behind the weight in memory's queues
    scales.load(p, group, first_row, piece);
    x.load(p, lane, group, piece);
  }
  x.convert(lane);
#pragma unroll 1
  for (int first = 0; first < kTiles; first += kAhead)
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      const int tile = first + a;
      u32 scale[4];
      scales.of(lane, tile, scale);
      const float4 rows = multiply(ahead[a], scale, x);
      if (tile + kAhead < kTiles)
        ahead[a].load(w + (tile + kAhead) * kTileRows * p.w_row, p.w_row, policy);
      if (lane.c == lane.stretch)
        *(float4*)(sums + (piece * kStretches + lane.c) * kSum + tile * kTileRows + lane.row) =
            rows;
    }
  __syncthreads();
  store(p, sums, group, first_row);
}
