// The two output warpgroups: O = P V (256 dims each), and the epilogue from registers.
//
// Fragments: lane (row, col) of warp w holds heads 16w + row and 16w + row + 8. By the tile's column
// order it owns dims 4*col .. +3 of every 16: RoPE pairs are local, the amax over 32 dims takes two
// shuffles, and eight rows are one wo_a group, whose 32-dim chunk is 256 contiguous output bytes.
#pragma once

#include "scores.cuh"

// Divides, rotates back and quantizes a chunk: eight heads (one a row) x 32 dims. v: dims 4*col..+3
// of the first 16, then of the second, not yet divided. Writes the lane's 8 codes at `out` (see
// code_offset); returns the scale byte of the lane's head.
DEVICE u32 finish_chunk(float (&v)[8], float inverse, const float* cos_sin, int chunk, u8* out,
                        int col) {
  const int rope = chunk - (kOutChunks - kRopeDims / kOutChunk);
  if (rope >= 0) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int pair = rope * 16 + (i >> 2) * 8 + 2 * col + ((i >> 1) & 1);
      const float cos = cos_sin[pair], sin = cos_sin[pair + kRopeDims / 2], a = v[i], b = v[i + 1];
      v[i] = __fadd_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
      v[i + 1] = __fsub_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
    }
  }
  float most = fabsf(v[0]);
#pragma unroll
  for (int i = 1; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  most = fmaxf(most * inverse, 1e-4f);
  // ceil(log2(most / 448)) + 127 on bits: 448 = 1.75 * 2^8
  const u32 byte = (__float_as_uint(most) - 0x04600001u + 0x00800000u) >> 23;
  const float factor = __uint_as_float((254 - byte) << 23) * inverse;
  const u32 first = pack_e4m3(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor);
  const u32 second = pack_e4m3(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor);
  // Neighbouring lanes trade words: even lanes store 8 of the first 16 dims, odd lanes of the second.
  const bool odd = col & 1;
  const u32 other = __shfl_xor_sync(~0u, odd ? first : second, 1);
  *(uint2*)out = odd ? make_uint2(other, second) : make_uint2(first, other);
  return byte;
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

// Each lane holds four bytes of its row; afterwards lane row 4h + b holds byte b of rows 4h..4h+3.
DEVICE u32 transpose_bytes(u32 bytes, int row) {
  const u32 far = __shfl_xor_sync(~0u, bytes, 8);
  bytes = __byte_perm(bytes, far, row & 2 ? 0x3276 : 0x5410);
  const u32 near = __shfl_xor_sync(~0u, bytes, 4);
  return __byte_perm(bytes, near, row & 1 ? 0x3715 : 0x6240);
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

  // Brings an item's Q into L2 ahead of its copy. One thread.
  DEVICE void prefetch_q(int item) const {
    const u16* q = p.q + token_of(p, item) * p.q_stride + first_head(p, item) * 16;
    const int pieces = p.head_tiles == 1 ? 1 : kDim / 16;
#pragma unroll 1
    for (int i = 0; i < pieces; i++)
      bulk_prefetch_l2(q + i * p.head_tiles * kHeads * 16, kTileBytes / pieces);
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
    const u64 probs = tile_descriptor<128>(smem + kSmemP, kTileGroup);
    const u64 values =
        tile_descriptor<128>(smem + kSmemKV + tile * kTileBytes + half * 4 * kTileGroup, kTileGroup);
    const u32 free = smem + kBarTileFree + tile * kSteps * 8;
    pin(o[0]);
    pin(o[1]);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const u64 step = descriptor_step(s * kStep * 128);
      wgmma_m64n128(o[0], probs + step, values + step, s || !first);
      wgmma_m64n128(o[1], probs + step, values + step + descriptor_step(2 * kTileGroup), s || !first);
      wgmma_commit();
      if (s > 0) {
        wgmma_wait<1>();
        if (me.lane == 0) mbar_arrive(free + (s - 1) * 8);
      }
    }
    wgmma_wait<0>();
    pin(o[0]);
    pin(o[1]);
    if (me.lane == 0) mbar_arrive(free + (kSteps - 1) * 8);
  }

  DEVICE void store_item(int item, u32 turn) {
    const float* inverse = (const float*)(mem + kSmemInverse) + (turn & 1) * kHeads;
    const float* cos_sin = (const float*)(mem + kSmemCosSin) + (turn & 1) * kRopeDims;
    u8* out = chunk_out(item, 2 * me.warp, half * 8) + code_offset(me);
    u32 bytes = 0;  // of chunks col and col + 4, rows and rows + 8
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float inv = inverse[16 * me.warp + 8 * r + me.row];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float v[8];
        chunk_fragment(j, r, v);
        u8* to = out + (r * kOutChunks + j) * (kWvGroup * kOutChunk);
        const u32 byte = finish_chunk(v, inv, cos_sin, half * 8 + j, to, me.col);
        if (me.col == (j & 3)) bytes |= byte << (8 * (2 * r + (j >> 2)));
      }
    }
    const int r = (me.row >> 1) & 1, j = me.col + 4 * (me.row & 1);
    *scale_out(item, 2 * me.warp + r, half * 8 + j, me.row >> 2) = transpose_bytes(bytes, me.row);
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
      const u32 byte = finish_chunk(v, inverse_sum(reference, sum, sink), cos_sin, chunk,
                                    chunk_out(item, group, chunk) + code_offset(me), me.col);
      const u32 word = join_heads(byte, me.row);
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
    if (half == 0 && me.warp == 0 && me.lane == 0 && item + item_step < p.items)
      out.prefetch_q(item + item_step);
    bool first = true, last;
#pragma unroll 1
    do {
      const u32 tile = block & 1;
      mbar_wait(smem + kBarProbsFull + 8 * tile, (block >> 1) & 1);
      last = load_shared(smem + kSmemMeta + (block % kSlots) * 4) & kMetaLast;
      out.accumulate(block, first);
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
