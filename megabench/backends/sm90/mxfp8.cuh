// e4m3 codes under ue8m0 scales -> bf16, exactly, on integer bits; and the operand order that makes
// of them.
//
// A conversion step yields the pairs (0, 2) and (1, 3) of four neighbouring codes. They are used as
// they come, on both sides of a product: a lane's word of 16 columns gives it the even pair for
// wgmma's columns 2c, 2c + 1 and the odd pair for 2c + 8, 2c + 9.
#pragma once

#include "ptx.cuh"

constexpr int kColumns = 128;             // reduction columns of a stage: one word of four scales

// A code moved into bf16's fields is worth code * 2^-120, which `factor` makes good.
DEVICE void widen(u32 codes, u32 factor, u32& even, u32& odd) {
  const u32 e = ((codes << 8) & 0x80008000u) | ((codes << 4) & 0x07f007f0u);
  const u32 o = (codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u);
  even = mul_bf16x2(e, factor);
  odd = mul_bf16x2(o, factor);
}
// Scale bytes above kLargest need their factor in two steps to stay inside bf16's exponents.
constexpr u32 kLargest = 134, kTwice = 0x00800080u;
DEVICE u32 first_factor(u32 scale) { return min(scale, kLargest) * kTwice + 120 * kTwice; }
DEVICE u32 rest_factor(u32 scale) { return (max(scale, kLargest) - kLargest + 127) * kTwice; }
DEVICE bool has_large(u32 scales) { return scales & 0x80808080u; }  // or one of 128..kLargest
DEVICE u32 byte_of(u32 word, int i) { return __byte_perm(word, 0, 0x4440 + i); }

// The MXFP8 operands of a grouped product, out[t, g, d] = sum over r of x[t, g, r] w[g, d, r].
struct Operands {
  const u8* x;             // e4m3 [tokens][groups][columns]
  const u8* w;             // e4m3 [groups][rows][columns]
  const u32* x_scale;      // ue8m0 x 4, one word for 128 columns
  const u32* w_scale;
  u16* out;                // bf16 [tokens][groups][rows]
  i64 x_token, x_group;    // strides: bytes, words or elements
  i64 w_row, w_group;
  i64 x_scale_token, x_scale_group, x_scale_word;
  i64 w_scale_row, w_scale_group, w_scale_word;
  i64 out_token, out_group;
  int tokens;
  int words;               // columns / 128
};
