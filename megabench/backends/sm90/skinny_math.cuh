// What the products of a handful of tokens share: parameters (mirrored by skinny_launch.py), loads,
// codes -> f16, mma.sync.
#pragma once

#include "mxfp8.cuh"

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kPieceWords = 2, kPieceColumns = kPieceWords * kColumns;

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
