// Grouped product of MXFP8 operands for a handful of tokens: the weight streams from memory
// straight into the registers of mma.sync, with no ring to fill first.
//
// A CTA has 16 weight rows, a warp its share of their columns; four CTAs share an SM. Lane 4g + c
// has 16 codes of rows g and g + 8 and of token g, columns 16c.. of 64. Its word s of them makes
// the fragments of step s, on both sides.
#include "mxfp8.cuh"

constexpr int kTokens = 8, kRows = 16;
constexpr int kWarps = 4, kThreads = 32 * kWarps, kResident = 4;
constexpr int kAhead = 2;                 // words on their way

struct Params {
  Operands o;
  int row_tiles;
};

DEVICE uint4 load_once(const u8* p, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(policy));
  return v;
}
DEVICE void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void widen16(const uint4& v, u32 scale, u32 (&even)[4], u32 (&odd)[4]) {
  const u32 codes[4] = {v.x, v.y, v.z, v.w};
  widen16(codes, scale, even, odd);
}

struct Word {              // 128 columns of the lane's two rows and its token
  uint4 w[2][2], x[2];     // [64 columns][row, row + 8]
  u32 w_scale[2], x_scale;
};

struct Stream {
  const Operands& o;
  bool live;
  int c;
  u64 policy;
  const u8 *w, *x;
  const u32 *w_scale, *x_scale;

  DEVICE Stream(const Operands& operands, int group, int row, int token, int c_, int word)
      : o(operands), live(token < o.tokens), c(c_) {
    const i64 column = (i64)word * kColumns + 16 * c;
    policy = once_policy();
    w = o.w + group * o.w_group + row * o.w_row + column;
    x = o.x + group * o.x_group + token * o.x_token + column;
    w_scale = o.w_scale + group * o.w_scale_group + row * o.w_scale_row + word * o.w_scale_word;
    x_scale = o.x_scale + group * o.x_scale_group + token * o.x_scale_token + word * o.x_scale_word;
  }

  // The next word. Tokens past the last are zeros, unread.
  DEVICE void fetch(Word& word) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        word.w[h][half] = load_once(w + 64 * h + half * 8 * o.w_row, policy);
#pragma unroll
    for (int half = 0; half < 2; half++)
      word.w_scale[half] = __ldg(w_scale + half * 8 * o.w_scale_row);
#pragma unroll
    for (int h = 0; h < 2; h++) word.x[h] = live ? __ldg((const uint4*)(x + 64 * h)) : uint4();
    word.x_scale = live ? __ldg(x_scale) : 0;
    w += kColumns, x += kColumns;
    w_scale += o.w_scale_word, x_scale += o.x_scale_word;
  }

  DEVICE void multiply(const Word& word, float (&acc)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int at = 8 * (2 * h + c / 2);  // of this lane's scale
      u32 even[3][4], odd[3][4];           // row, row + 8, token
#pragma unroll
      for (int half = 0; half < 2; half++)
        widen16(word.w[h][half], word.w_scale[half] >> at & 0xff, even[half], odd[half]);
      widen16(word.x[h], word.x_scale >> at & 0xff, even[2], odd[2]);
#pragma unroll
      for (int s = 0; s < 4; s++)
        mma(acc, {even[0][s], even[1][s], odd[0][s], odd[1][s]}, {even[2][s], odd[2][s]});
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    sm90_skinny_product(const __grid_constant__ Params p) {
  __shared__ float partial[kWarps][kTokens][kRows];
  const Operands& o = p.o;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  const int group = blockIdx.x / p.row_tiles, row = blockIdx.x % p.row_tiles * kRows;
  const int first = warp * o.words / kWarps, last = (warp + 1) * o.words / kWarps;

  Stream stream(o, group, row + g, g, c, first);
  Word words[kAhead];
  float acc[4] = {};
#pragma unroll
  for (int i = 0; i < kAhead; i++)
    if (first + i < last) stream.fetch(words[i]);
#pragma unroll 1
  for (int word = first; word < last; word += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (word + i >= last) break;
      stream.multiply(words[i], acc);
      if (word + i + kAhead < last) stream.fetch(words[i]);
    }
  }

  // The warps' sums, in order.
#pragma unroll
  for (int i = 0; i < 4; i++) partial[warp][2 * c + (i & 1)][g + (i >> 1) * 8] = acc[i];
  __syncthreads();
  const int token = threadIdx.x / 8, pair = threadIdx.x % 8 * 2;
  if (token < min(kTokens, o.tokens)) {
    float lo = 0, hi = 0;
#pragma unroll
    for (int i = 0; i < kWarps; i++)
      lo += partial[i][token][pair], hi += partial[i][token][pair + 1];
    *(u32*)(o.out + token * o.out_token + group * o.out_group + row + pair) = pack_bf16(lo, hi);
  }
}
