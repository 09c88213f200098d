// From a lane's chunk of output to the op's layout: the divisor, inverse RoPE, the per-32 FP8 cast,
// stores.
#pragma once

#include "cast.cuh"
#include "layout.cuh"

constexpr float kNoReference = -1e30f;
constexpr float kLn2 = 0.69314718055994531f, kLog2e = 1.4426950408889634f;

// What one head's output is divided by: its sum plus the sink's share.
DEVICE float inverse_sum(float reference, float sum, float sink) {
  return sum > 0.f ? __fdividef(1.f, sum + exp2_approx(sink * kLog2e - reference)) : 0.f;
}
DEVICE float natural_lse(float reference, float sum) {
  return sum > 0.f ? (reference + log2_approx(sum)) * kLn2 : kInfinity;
}

// Inverse RoPE of chunk `rope` (0 or 1) of the last 64 dims.
DEVICE void rotate_back(Chunk& c, const float* cos_sin, int rope, int col) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const int pair = rope * 16 + (i >> 2) * 8 + 2 * col + ((i >> 1) & 1);
    const float cos = cos_sin[pair], sin = cos_sin[pair + kRopeDims / 2];
    const float a = c.v[i], b = c.v[i + 1];
    c.v[i] = __fadd_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
    c.v[i + 1] = __fsub_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
  }
}

// Divides and quantizes N chunks, in step so that their shuffles overlap. Stores the lane's 8 codes
// of each (see code_offset) and returns the scale bytes of the lane's heads.
template <int N>
DEVICE void quantize(const Chunk (&c)[N], const float (&inverse)[N], u8* const (&out)[N],
                     u32 (&byte)[N], int col) {
  float factor[N];
  u32 mine[N], other[N];
  const bool odd = col & 1;
  cast_scales(c, inverse, byte, factor);
#pragma unroll
  for (int n = 0; n < N; n++) {  // even lanes store 8 of the first 16 dims, odd lanes of the second
    const float *v = c[n].v, f = factor[n];
    const u32 first = pack_e4m3(v[0] * f, v[1] * f, v[2] * f, v[3] * f);
    const u32 second = pack_e4m3(v[4] * f, v[5] * f, v[6] * f, v[7] * f);
    mine[n] = odd ? second : first;
    other[n] = __shfl_xor_sync(~0u, odd ? first : second, 1);
  }
#pragma unroll
  for (int n = 0; n < N; n++)
    *(uint2*)out[n] = odd ? make_uint2(other[n], mine[n]) : make_uint2(mine[n], other[n]);
}
// Where in a chunk's 256 bytes a lane stores.
DEVICE u32 code_offset(Lane me) {
  return me.row * kOutChunk + (me.col & 1 ? 16 + 4 * (me.col - 1) : 4 * me.col);
}

// Scale bytes of four heads (rows 4h..4h+3) as one word, in all their lanes.
DEVICE u32 join_heads(u32 byte, int row) {
  u32 word = byte << (8 * (row & 3));
  word |= __shfl_xor_sync(~0u, word, 4);
  return word | __shfl_xor_sync(~0u, word, 8);
}

// Where a chunk of a wo_a group's eight heads goes, and a word of its scales (four heads).
DEVICE u8* chunk_out(const Params& p, int item, int group, int chunk) {
  // an item's head tile follows its token
  return p.out + (((i64)item * kGroups + group) * kOutChunks + chunk) * (kWvGroup * kOutChunk);
}
DEVICE u32* scale_out(const Params& p, int item, int group, int chunk, int word) {
  const int tile_group = first_head(p, item) / kWvGroup + group;
  return p.scales + token_of(p, item) + (chunk * 2 + word) * p.scale_word +
         tile_group * p.scale_group;
}
