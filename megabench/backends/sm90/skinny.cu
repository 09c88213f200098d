// Grouped product of MXFP8 operands for a handful of tokens: the weight streams from memory
// straight into the registers of mma.sync, with no ring to fill first.
//
// A CTA has tiles of 16 weight rows, a warp a piece of 256 columns: it takes the piece through the
// tiles, two words of 128 columns ahead, with its activations in registers. Codes become f16 as
// they are, and the sums of a block of 32 columns are scaled in float32. The pieces' sums meet in
// shared memory.
#include "skinny.cuh"

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
    const u32 row = (first_tile + team) * kRows + lane.row();
    w_first = group * p.w_group + row * p.w_row + lane.column();
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
    const u32 at = scale + j * p.w_scale_word;
#pragma unroll
    for (int m = 0; m < kRowGroups; m++)
#pragma unroll
      for (int lower = 0; lower < 2; lower++)
        word.scale[m][lower] = load4(p.w_scale + (at + row_of(m, lower) * p.w_scale_row));
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int lower = 0; lower < 2; lower++)
        load16_once(p.w + (w + row_of(m, lower) * p.w_row) + j * kColumns + column_of(m), policy,
                    word.w[m][lower]);
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
    float acc[kRowGroups][4] = {};
#pragma unroll
    for (int j = 0; j < kPieceWords; j++) {
      const Word word = words[j];
      ahead.fetch(j, words[j]);
      if (j == 0 || piece * kPieceWords + j < p.words) multiply(lane, word, x, j, acc);
    }
    keep(lane, acc, sums + (tile * p.pieces + piece) * kSum);
    if (ahead.piece != piece && ahead.piece < p.pieces) {
      x.load(p, lane, group, ahead.piece);
      x.convert(lane);
    }
    piece = ahead.piece, tile = ahead.tile;
  }
  __syncthreads();
  store(p, sums, group, first_tile, ahead.tiles);
}
