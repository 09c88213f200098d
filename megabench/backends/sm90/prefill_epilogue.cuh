// The prefill's epilogue from registers: inverse RoPE, per-32 cast, wo_a layout.
//
// Lane (row, col) of warp w holds heads 16w + row and 16w + row + 8, and dims 2*col, 2*col + 1 of
// each of a chunk's four eights: RoPE pairs are local, the amax over 32 dims takes two shuffles,
// and two more gather 8 neighbouring codes in a lane.
#pragma once

#include "cast.cuh"
#include "prefill_layout.cuh"

constexpr u32 kChunkBytes = kWvGroup * kOutChunk, kWvGroupBytes = kOutChunks * kChunkBytes;

DEVICE void rotate_back(Chunk& c, u32 cos_sin, int first_pair, int col) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const u32 at = cos_sin + (first_pair + 4 * n + col) * 4;
    const float cos = load_shared_float(at), sin = load_shared_float(at + kRopeDims / 2 * 4);
    const float a = c.v[2 * n], b = c.v[2 * n + 1];
    c.v[2 * n] = __fadd_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
    c.v[2 * n + 1] = __fsub_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
  }
}

// Moves codes among the four lanes of a head: each gives two dims of every eight and gets the
// eight of its own column.
struct Gather {
  bool upper;
  u32 keep, send, low, high;  // byte selectors

  DEVICE explicit Gather(int col) : upper(col & 2) {
    const u32 even = upper ? 0x1054 : 0x5410, odd = upper ? 0x3276 : 0x7632;
    keep = col & 1 ? odd : even;
    send = col & 1 ? even : odd;
    low = col & 1 ? 0x1054 : 0x5410;
    high = col & 1 ? 0x3276 : 0x7632;
  }
};

// Divides and quantizes N chunks, in step so that their shuffles overlap. Stores the lane's 8 codes
// of each and returns the scale bytes of the lane's heads.
template <int N>
DEVICE void quantize(const Chunk (&c)[N], const float (&inverse)[N], u8* const (&out)[N],
                     u32 (&byte)[N], const Gather& gather) {
  float factor[N];
  u32 mine[N], other[N];
  cast_scales(c, inverse, byte, factor);
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float *v = c[n].v, f = factor[n];
    const u32 first = pack_e4m3(v[0] * f, v[1] * f, v[2] * f, v[3] * f);
    const u32 second = pack_e4m3(v[4] * f, v[5] * f, v[6] * f, v[7] * f);
    const u32 kept = gather.upper ? second : first;
    const u32 got = __shfl_xor_sync(~0u, gather.upper ? first : second, 2);
    mine[n] = __byte_perm(kept, got, gather.keep);
    other[n] = __shfl_xor_sync(~0u, __byte_perm(kept, got, gather.send), 1);
  }
#pragma unroll
  for (int n = 0; n < N; n++)
    *(uint2*)out[n] = make_uint2(__byte_perm(mine[n], other[n], gather.low),
                                 __byte_perm(mine[n], other[n], gather.high));
}

// Dims 256*half .. +255 of an item's output, times the heads' inverse sums. `o`: wgmma's fragments.
DEVICE void store_output(const Params& p, const float (&o)[2][64], Lane me, int half, int item,
                         const float (&inverse)[2], u32 cos_sin) {
  const int groups = kHeads / kWvGroup;
  u8* out = p.out + ((i64)item * groups + 2 * me.warp) * kWvGroupBytes + half * 8 * kChunkBytes +
            me.row * kOutChunk + me.col * 8;
  const Gather gather(me.col);
  u32 bytes = 0;  // of chunks col and col + 4, rows and rows + 8
  constexpr int kChunks = 2;  // in step, for both of the lane's heads
#pragma unroll
  for (int j = 0; j < 8; j += kChunks) {
    Chunk c[2 * kChunks];
    float inverses[2 * kChunks];
    u8* to[2 * kChunks];
    u32 byte[2 * kChunks];
#pragma unroll
    for (int n = 0; n < 2 * kChunks; n++) {  // chunk j + n / 2, head row + 8 * (n % 2)
      const float* t = o[(j + n / 2) >> 2] + ((j + n / 2) & 3) * 16 + 2 * (n & 1);
#pragma unroll
      for (int i = 0; i < 8; i++) c[n].v[i] = t[4 * (i >> 1) + (i & 1)];
      if (half == 1 && j + n / 2 >= 6) rotate_back(c[n], cos_sin, (j + n / 2 - 6) * 16, me.col);
      inverses[n] = inverse[n & 1];
      to[n] = out + (j + n / 2) * kChunkBytes + (n & 1) * kWvGroupBytes;
    }
    quantize<2 * kChunks>(c, inverses, to, byte, gather);
#pragma unroll
    for (int n = 0; n < 2 * kChunks; n++)
      if (me.col == ((j + n / 2) & 3)) bytes |= byte[n] << (8 * ((j + n / 2) >> 2) + 16 * (n & 1));
  }
  const int r = (me.row >> 1) & 1, j = me.col + 4 * (me.row & 1);
  const int group = first_head(p, item) / kWvGroup + 2 * me.warp + r;
  p.scales[token_of(p, item) + ((half * 8 + j) * 2 + (me.row >> 2)) * p.scale_word +
           group * p.scale_group] = transpose_bytes(bytes, me.row);
}
