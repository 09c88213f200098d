// The two output warpgroups: O = P V (256 dims each), and the epilogue from registers.
//
// Fragments: lane (row, col) of warp w holds heads 16w + row and 16w + row + 8. By the tile's column
// order it owns dims 4*col .. +3 of every 16: RoPE pairs are local, the amax over 32 dims takes two
// shuffles, and eight rows are one wo_a group, whose 32-dim chunk is 256 contiguous output bytes.
#pragma once

#include "scores.cuh"

// Divides, rotates back and quantizes a chunk: eight heads (one a row) x 32 dims. v: dims 4*col..+3
// of the first 16, then of the second. Writes 256 codes at `out`; returns the scale bytes of heads
// 0-3 (lanes 0-15) or 4-7 (lanes 16-31) as one word.
DEVICE u32 finish_chunk(float (&v)[8], float inverse, const float* cos_sin, int chunk, u8* out,
                        Lane me) {
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= inverse;
  const int rope = chunk - (kOutChunks - kRopeDims / kOutChunk);
  if (rope >= 0) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int pair = rope * 16 + (i >> 2) * 8 + 2 * me.col + ((i >> 1) & 1);
      const float cos = cos_sin[pair], sin = cos_sin[pair + kRopeDims / 2], a = v[i], b = v[i + 1];
      v[i] = __fadd_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
      v[i + 1] = __fsub_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
    }
  }
  float most = 1e-4f;
#pragma unroll
  for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  // ceil(log2(most / 448)) + 127 on bits: 448 = 1.75 * 2^8
  const u32 bits = __float_as_uint(most);
  const u32 byte = (bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u);
  const float factor = __uint_as_float((254 - byte) << 23);
  const u32 first = pack_e4m3(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor);
  const u32 second = pack_e4m3(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor);
  // Neighbouring lanes trade words, so that each stores 8 bytes: even lanes of the first 16 dims.
  const bool odd = me.col & 1;
  const u32 other = __shfl_xor_sync(~0u, odd ? first : second, 1);
  const u32 at = me.row * kOutChunk + (odd ? 16 + 4 * (me.col - 1) : 4 * me.col);
  *(uint2*)(out + at) = odd ? make_uint2(other, second) : make_uint2(first, other);
  u32 word = byte << (8 * (me.row & 3));
  word |= __shfl_xor_sync(~0u, word, 4);
  word |= __shfl_xor_sync(~0u, word, 8);
  return word;
}

struct Output {
  const Params& p;
  u8* mem;
  u32 smem;
  Lane me;
  int half;            // which 256 dims
  float o[2][64];

  DEVICE Output(const Params& params, u8* smem_base, Lane lane, int which)
      : p(params), mem(smem_base), smem(smem_address(smem_base)), me(lane), half(which) {}

  DEVICE u8* chunk_out(int item, int group, int chunk) const {
    const int groups = kHeads / kWvGroup;  // of one item; an item's head tile follows its token
    return p.out + (((i64)item * groups + group) * kOutChunks + chunk) * (kWvGroup * kOutChunk);
  }
  DEVICE u32* scale_out(int item, int group, int chunk, int word) const {
    const int tile_group = first_head(p, item) / kWvGroup + group;
    return p.scales + token_of(p, item) + (chunk * 2 + word) * p.scale_word +
           tile_group * p.scale_group;
  }

  // Fragment of chunk j (0..7 of this half), rows +8*r: dims 4*col..+3 of both 16s.
  DEVICE void chunk_fragment(int j, int r, float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* t = o[j >> 2] + (j & 3) * 16 + i * 8 + 2 * r;
      v[4 * i] = t[0];
      v[4 * i + 1] = t[4];
      v[4 * i + 2] = t[1];
      v[4 * i + 3] = t[5];
    }
  }

  // Brings an item's Q into L2 ahead of its copy: 32 chunks of 2 KB.
  DEVICE void prefetch_q(int item) const {
    const int token = token_of(p, item), head0 = first_head(p, item);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int line = (i * 2 + half) * kRoleThreads + me.warp * 32 + me.lane;
      prefetch_l2(p.q + token * p.q_stride + (line / 16 * p.head_tiles * kHeads + head0) * 16 +
                  line % 16 * 64);
    }
  }

  DEVICE void accumulate(u32 block, bool first) {
    const u32 tile = block & 1;
    if (*(volatile u32*)(mem + kSmemRaised + 4 * tile)) {
      const float* alpha = (const float*)(mem + kSmemAlpha) + tile * kHeads + 16 * me.warp + me.row;
      const float a = alpha[0], b = alpha[8];
#pragma unroll
      for (int i = 0; i < 128; i += 4) {
        float* t = &o[i >> 6][i & 63];
        t[0] *= a;
        t[1] *= a;
        t[2] *= b;
        t[3] *= b;
      }
    }
    const u64 probs = tile_descriptor(smem + kSmemP, kTileGroup);
    const u64 values =
        tile_descriptor(smem + kSmemKV + tile * kTileBytes + half * 4 * kTileGroup, kTileGroup);
    pin(o[0]);
    pin(o[1]);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kBlock / 16; s++) {
      const u64 step = descriptor_step(s * 2048);
      wgmma_m64n128(o[0], probs + step, values + step, s || !first);
      wgmma_m64n128(o[1], probs + step, values + step + descriptor_step(2 * kTileGroup), s || !first);
    }
    wgmma_commit();
    wgmma_wait();
    pin(o[0]);
    pin(o[1]);
  }

  DEVICE void store_item(int item, u32 turn) {
    const float* inverse = (const float*)(mem + kSmemInverse) + (turn & 1) * kHeads;
    const float* cos_sin = (const float*)(mem + kSmemCosSin) + (turn & 1) * kRopeDims;
    u32 kept = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float inv = inverse[16 * me.warp + 8 * r + me.row];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float v[8];
        chunk_fragment(j, r, v);
        const int chunk = half * 8 + j;
        const u32 word = finish_chunk(v, inv, cos_sin, chunk,
                                      chunk_out(item, 2 * me.warp + r, chunk), me);
        if ((me.lane & 15) == r * 8 + j) kept = word;
      }
    }
    const int r = (me.lane >> 3) & 1, j = me.lane & 7;
    *scale_out(item, 2 * me.warp + r, half * 8 + j, me.lane >> 4) = kept;
  }

  // Every CTA of the cluster owns 8 / split groups: it gets their partial outputs from all ranks in
  // its own KV tiles ([group][chunk][rank] fragments of 1 KB), adds and finishes them.
  DEVICE void reduce_over_cluster(int item, int rank) {
    const int split = p.split, owned = kHeads / kWvGroup / split;
    cluster_sync();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int group = 2 * me.warp + r;
      const u32 base = smem + kSmemKV + ((group % owned) * kOutChunks * split + rank) * 1024;
      const u32 remote = map_to_rank(base, group / owned) + me.lane * 16;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float v[8];
        chunk_fragment(j, r, v);
        const u32 at = remote + (half * 8 + j) * split * 1024;
        store_remote4(at, v[0], v[1], v[2], v[3]);
        store_remote4(at + 512, v[4], v[5], v[6], v[7]);
      }
    }
    cluster_sync();
    const float2* parts = (const float2*)(mem + kSmemRaw);  // [rank][head]: reference, sum
    const float* cos_sin = (const float*)(mem + kSmemCosSin);
    const int head0 = first_head(p, item);
#pragma unroll 1
    for (int k = 4 * half + me.warp; k < owned * kOutChunks; k += 8) {
      const int chunk = k % kOutChunks, group = rank * owned + k / kOutChunks;
      const int head = group * kWvGroup + me.row;
      float reference = kNoReference, sum = 0.f, v[8] = {};
      for (int s = 0; s < split; s++) reference = fmaxf(reference, parts[s * kHeads + head].x);
      const float* part = (const float*)(mem + kSmemKV + k * split * 1024) + me.lane * 4;
      for (int s = 0; s < split; s++, part += 256) {
        const float2 t = parts[s * kHeads + head];
        const float weight = exp2_approx(t.x - reference);
        const float4 a = *(const float4*)part, b = *(const float4*)(part + 128);
        sum = fmaf(t.y, weight, sum);
        v[0] = fmaf(a.x, weight, v[0]);
        v[1] = fmaf(a.y, weight, v[1]);
        v[2] = fmaf(a.z, weight, v[2]);
        v[3] = fmaf(a.w, weight, v[3]);
        v[4] = fmaf(b.x, weight, v[4]);
        v[5] = fmaf(b.y, weight, v[5]);
        v[6] = fmaf(b.z, weight, v[6]);
        v[7] = fmaf(b.w, weight, v[7]);
      }
      const float sink = p.sink ? p.sink[head0 + head] : -kInfinity;
      const u32 word = finish_chunk(v, inverse_sum(reference, sum, sink), cos_sin, chunk,
                                    chunk_out(item, group, chunk), me);
      if ((me.lane & 15) == 0) *scale_out(item, group, chunk, me.lane >> 4) = word;
      if (chunk == 0 && me.col == 0)
        p.lse[(i64)(token_of(p, item)) * p.head_tiles * kHeads + head0 + head] =
            natural_lse(reference, sum);
    }
  }
};

DEVICE void output_role(const Params& p, u8* mem, int warp, int half, int first_item, int item_step,
                        int rank) {
  const Lane me(warp);
  Output out(p, mem, me, half);
  const u32 smem = out.smem;
  u32 block = 0, turn = 0;
#pragma unroll 1
  for (int item = first_item; item < p.items; item += item_step, turn++) {
    if (item + item_step < p.items) out.prefetch_q(item + item_step);
    bool first = true, last;
#pragma unroll 1
    do {
      const u32 tile = block & 1;
      mbar_wait(smem + kBarProbsFull + 8 * tile, (block >> 1) & 1);
      last = load_shared(smem + kSmemMeta + (block % kSlots) * 4) & kMetaLast;
      out.accumulate(block, first);
      __syncwarp();
      if (me.lane == 0) mbar_arrive(smem + kBarTileFree + 8 * tile);
      first = false;
      block++;
    } while (!last);
    if (p.split == 1) {
      mbar_wait(smem + kBarInverse, turn & 1);
      out.store_item(item, turn);
      __syncwarp();
      if (me.lane == 0) mbar_arrive(smem + kBarItemDone);
    } else {
      out.reduce_over_cluster(item, rank);
    }
  }
}
