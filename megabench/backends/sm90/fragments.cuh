// Codes in shared memory -> wgmma's A operand: bf16 fragments in the registers of the warps that
// multiply, 32 columns (a block under one scale) at a time.
#pragma once

#include "mxfp8.cuh"

using Codes = u32[2][2];      // of a block: [16 columns][row, row + 8]
using Fragments = u32[2][4];  // [16 columns][wgmma's four registers]

// Block q of a stage in 128-byte rows of 16-byte chunks ^ row, by ldmatrix: `raw` is a lane's, which
// has the address of one of the 16 rows, and of one half of a block.
DEVICE u32 matrix_row(int first, int lane) {
  return (first + (lane & 15)) * kColumns + ((lane & 7) << 4);
}
DEVICE void load_matrix_codes(int q, u32 raw, int lane, Codes& codes) {
  load_matrix4(raw ^ ((2 * q + (lane >> 4)) << 4), codes[0][0], codes[0][1], codes[1][0],
               codes[1][1]);
}

// The block's fragments. `scales`: of row, row + 8; `large`: has_large of any of the warp's.
DEVICE void widen_block(int q, const Codes& codes, const u32 (&scales)[2], bool large,
                        Fragments& a) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 factor = first_factor(byte_of(scales[half], q));
#pragma unroll
    for (int step = 0; step < 2; step++)
      widen(codes[step][half], factor, a[step][half], a[step][half + 2]);
  }
  if (large) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 rest = rest_factor(byte_of(scales[half], q));
#pragma unroll
      for (int step = 0; step < 2; step++) {
        a[step][half] = mul_bf16x2(a[step][half], rest);
        a[step][half + 2] = mul_bf16x2(a[step][half + 2], rest);
      }
    }
  }
}
