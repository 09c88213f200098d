// e4m3 codes under ue8m0 scales -> bf16 on integer bits, or f16 by the converter, exactly; and the
// operand order that makes of them.
//
// A conversion of four neighbouring codes yields the pairs (0, 2) and (1, 3), in f16 (0, 1) and
// (2, 3). They are used as they come, on both sides of a product: a lane's word of 16 columns gives
// it the first pair for wgmma's columns 2c, 2c + 1 and the second for 2c + 8, 2c + 9.
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
DEVICE void widen_any(u32 codes, u32 scale, u32& even, u32& odd) {
  widen(codes, first_factor(scale), even, odd);
  even = mul_bf16x2(even, rest_factor(scale)), odd = mul_bf16x2(odd, rest_factor(scale));
}
DEVICE bool has_large(u32 scales) { return scales & 0x80808080u; }  // or one of 128..kLargest
DEVICE u32 byte_of(u32 word, int i) { return __byte_perm(word, 0, 0x4440 + i); }

// ---- f16: half the instructions, and room for the scale bytes kFirst to kLast only. A block's
// values are code * 2^(scale - kUnit), from 2^-23 to 57344. An amax of 1e-4, the least that
// attention outputs are scaled by, to 224 gets these bytes.
constexpr u32 kFirst = 105, kLast = 126, kUnit = 119;
constexpr float kUnitOfProducts = 1.f / (1 << 2 * (127 - kUnit));

// Four codes: the first two and the last two.
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
DEVICE void to_f16(u32 codes, u32 factor, u32& low, u32& high) {
  to_f16(codes, low, high);
  low = mul_f16x2(low, factor), high = mul_f16x2(high, factor);
}
// The upper bytes of the factors of four scales that f16 has room for.
DEVICE u32 f16_factors(u32 scales) { return 4 * scales - 4 * (kUnit - 15) * 0x01010101u; }
constexpr u32 kUpperBytes = 0x01000100u;  // times one of them: a factor
DEVICE bool is_far(u32 scale) { return scale - kFirst > kLast - kFirst; }
// Whether one of four scales is: the top bits of their bytes. One that borrows or carries is far.
DEVICE u32 far_bits(u32 scales) {
  const u32 above = scales - kFirst * 0x01010101u;
  return (above | (above + (127 + kFirst - kLast) * 0x01010101u)) & 0x80808080u;
}
DEVICE bool any_value(const u32 (&codes)[4]) {  // other than zeros
  return (codes[0] | codes[1] | codes[2] | codes[3]) & 0x7f7f7f7fu;
}

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
