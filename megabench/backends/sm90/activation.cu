// Activations of a linear: bf16 rows -> e4m3 codes and ue8m0 scales for 32 columns, four to a word.
//
// t = amax * fp32(1/448); the scale is t's exponent, one more where t is no power of two; codes are
// x / scale, rounded to nearest even. A thread has 8 columns, 16 threads a word.
#include "ptx.cuh"

struct Params {
  const u16* x;    // bf16 [tokens][columns]
  u8* codes;       // e4m3 [tokens][columns]
  u32* scales;     // [tokens][columns / 128]
  i64 x_stride;
  int columns;     // a multiple of 128
};
constexpr int kThreads = 128, kEach = 8;

extern "C" __global__ void __launch_bounds__(kThreads)
    sm90_quantize(const __grid_constant__ Params p) {
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kEach;
  const i64 token = blockIdx.x;  // y has 65535 places at most
  const bool inside = column < p.columns;
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (inside) raw = *(const uint4*)(p.x + token * p.x_stride + column);
  const u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
  float x[kEach], amax = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    x[i] = __uint_as_float(i & 1 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16);
    amax = fmaxf(amax, fabsf(x[i]));
  }
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
  const u32 t = __float_as_uint(__fmul_rn(amax, 1.f / 448.f));
  const u32 scale = (t >> 23) + ((t & 0x7fffffu) != 0);
  const float inverse = __uint_as_float((254 - scale) << 23);
  u32 word = scale << (threadIdx.x / 4 % 4 * 8);
  word |= __shfl_xor_sync(~0u, word, 4);
  word |= __shfl_xor_sync(~0u, word, 8);
  if (!inside) return;
#pragma unroll
  for (int i = 0; i < kEach; i++) x[i] = __fmul_rn(x[i], inverse);
  *(uint2*)(p.codes + token * p.columns + column) =
      make_uint2(pack_e4m3(x[0], x[1], x[2], x[3]), pack_e4m3(x[4], x[5], x[6], x[7]));
  if (threadIdx.x % 16 == 0) p.scales[token * (p.columns / 128) + column / 128] = word;
}
