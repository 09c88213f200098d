// The per-32 FP8 cast of attention's output, as far as decode and prefill have it in common: they
// differ in which dims a lane holds.
#pragma once

#include "ptx.cuh"

// A lane's share of a chunk: 8 of the 32 dims of one head (one a row), which four lanes hold.
struct Chunk {
  float v[8];
};

// Scale bytes of N chunks, and what their values are multiplied by: inverse sum over scale. In
// step, so that shuffles overlap.
template <int N>
DEVICE void cast_scales(const Chunk (&c)[N], const float (&inverse)[N], u32 (&byte)[N],
                        float (&factor)[N]) {
  float most[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    most[n] = fabsf(c[n].v[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) most[n] = fmaxf(most[n], fabsf(c[n].v[i]));
  }
#pragma unroll
  for (int d = 1; d < 4; d <<= 1)
#pragma unroll
    for (int n = 0; n < N; n++) most[n] = fmaxf(most[n], __shfl_xor_sync(~0u, most[n], d));
#pragma unroll
  for (int n = 0; n < N; n++) {
    // ceil(log2(amax / 448)) + 127 on bits: 448 = 1.75 * 2^8
    const u32 bits = __float_as_uint(fmaxf(most[n] * inverse[n], 1e-4f));
    byte[n] = (bits - 0x04600001u + 0x00800000u) >> 23;
    factor[n] = __uint_as_float((254 - byte[n]) << 23) * inverse[n];
  }
}

// Each lane holds four bytes of its row; afterwards lane row 4h + b holds byte b of rows 4h..4h+3.
DEVICE u32 transpose_bytes(u32 bytes, int row) {
  const u32 far = __shfl_xor_sync(~0u, bytes, 8);
  bytes = __byte_perm(bytes, far, row & 2 ? 0x3276 : 0x5410);
  const u32 near = __shfl_xor_sync(~0u, bytes, 4);
  return __byte_perm(bytes, near, row & 1 ? 0x3715 : 0x6240);
}
