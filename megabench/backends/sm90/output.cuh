// The two output warpgroups: O = P V (256 dims each), and the epilogue from registers.
//
// Fragments: lane (row, col) of warp w holds heads 16w + row and 16w + row + 8. By the tile's
// column order it owns dims 4*col .. +3 of every 16: RoPE pairs are local, the amax over 32 dims
// takes two shuffles, and eight rows are one wo_a group, whose 32-dim chunk is 256 contiguous bytes
// of output.
#pragma once

#include "cast.cuh"
#include "scores.cuh"

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

  // Chunk j (0..7) of this half, heads 16*warp + 8*r + row.
  DEVICE Chunk fragment(int j, int r) const {
    Chunk c;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* t = o[j >> 2] + (j & 3) * 16 + i * 8 + 2 * r;
      c.v[4 * i] = t[0];
      c.v[4 * i + 1] = t[4];
      c.v[4 * i + 2] = t[1];
      c.v[4 * i + 3] = t[5];
    }
    return c;
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
    const u64 values = tile_descriptor<128>(
        smem + kSmemKV + tile * kTileBytes + half * 4 * kTileGroup, kTileGroup);
    const u32 free = smem + kBarTileFree + tile * kSteps * 8;
    pin(o[0]);
    pin(o[1]);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const u64 step = descriptor_step(s * kStep * 128);
      wgmma_m64n128(o[0], probs + step, values + step, s || !first);
      wgmma_m64n128(o[1], probs + step, values + step + descriptor_step(2 * kTileGroup),
                    s || !first);
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
    const float inv0 = inverse[16 * me.warp + me.row], inv1 = inverse[16 * me.warp + 8 + me.row];
    u32 bytes = 0;  // of chunks col and col + 4, rows and rows + 8
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      Chunk c[4] = {fragment(j, 0), fragment(j, 1), fragment(j + 1, 0), fragment(j + 1, 1)};
      if (j == 6 && half == 1) {
#pragma unroll
        for (int n = 0; n < 4; n++) rotate_back(c[n], cos_sin, n / 2, me.col);
      }
      constexpr u32 kChunkBytes = kWvGroup * kOutChunk, kGroupBytes = kOutChunks * kChunkBytes;
      u8* const to = out + j * kChunkBytes;
      u32 byte[4];
      quantize<4>(c, {inv0, inv1, inv0, inv1},
                  {to, to + kGroupBytes, to + kChunkBytes, to + kChunkBytes + kGroupBytes}, byte,
                  me.col);
      const int place = 8 * (j >> 2);
      if (me.col == (j & 3)) bytes |= byte[0] << place | byte[1] << (place + 16);
      if (me.col == (j & 3) + 1) bytes |= byte[2] << place | byte[3] << (place + 16);
    }
    const int r = (me.row >> 1) & 1, j = me.col + 4 * (me.row & 1);
    *scale_out(item, 2 * me.warp + r, half * 8 + j, me.row >> 2) = transpose_bytes(bytes, me.row);
  }

  // Every CTA of the cluster finishes some units: it gets their partial outputs from all ranks in
  // place of its Q and KV tiles ([unit][half][rank] fragments of 1 KB), adds and stores them.
  DEVICE void reduce_over_cluster(int item, int rank) {
    const int split = p.split;
    const Share share(p, rank);
    cluster_meet();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int group = 2 * me.warp + r - share.group0;
      if (group < 0 || group >= share.groups) continue;
#pragma unroll
      for (int j = 0; j < kUnitsPerGroup; j++) {
        const int unit = group * kUnitsPerGroup + j, owner = unit * split >> share.bits;
        const u32 place = ((unit & share.places) * 2 + half) * split + rank;
        const u32 at = map_to_rank(smem + kSmemQ + place * 1024, owner) + me.lane * 16;
        const Chunk c = fragment(j, r);
        store_remote4(at, c.v[0], c.v[1], c.v[2], c.v[3]);
        store_remote4(at + 512, c.v[4], c.v[5], c.v[6], c.v[7]);
      }
    }
    cluster_sync();
    const float2* parts = (const float2*)(mem + kSmemRaw);  // [rank][head]: reference, sum
    const float* cos_sin = (const float*)(mem + kSmemCosSin);
    const int head0 = first_head(p, item), pitch = split * 256;  // floats from half to half
#pragma unroll 1
    for (int k = 4 * half + me.warp; k < share.owned; k += 8) {
      const int unit = share.unit0 + k, chunk = unit % kUnitsPerGroup;
      const int group = share.group0 + unit / kUnitsPerGroup, head = group * kWvGroup + me.row;
      const float2* mine = parts + head;
      const float sink = ((const float*)(mem + kSmemSink))[head0 + head];
      float reference = kNoReference, sum = 0.f;
#pragma unroll 2
      for (int s = 0; s < split; s++) reference = fmaxf(reference, mine[s * kHeads].x);
      Chunk c[2] = {};
      const float* part =
          (const float*)(mem + kSmemQ) + (unit & share.places) * 2 * pitch + me.lane * 4;
#pragma unroll 2
      for (int s = 0; s < split; s++, part += 256) {
        const float2 t = mine[s * kHeads];
        const float weight = exp2_approx(t.x - reference);
        sum = fmaf(t.y, weight, sum);
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float4 a = *(const float4*)(part + n / 2 * pitch + n % 2 * 128);
          float* v = c[n / 2].v + n % 2 * 4;
          v[0] = fmaf(a.x, weight, v[0]);
          v[1] = fmaf(a.y, weight, v[1]);
          v[2] = fmaf(a.z, weight, v[2]);
          v[3] = fmaf(a.w, weight, v[3]);
        }
      }
      if (chunk >= 6) rotate_back(c[1], cos_sin, chunk - 6, me.col);
      const float inverse = inverse_sum(reference, sum, sink);
      u8* const to = chunk_out(item, group, chunk) + code_offset(me);
      u32 byte[2];
      quantize<2>(c, {inverse, inverse}, {to, to + 8 * kWvGroup * kOutChunk}, byte, me.col);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const u32 word = join_heads(byte[n], me.row);
        if ((me.lane & 15) == 0) *scale_out(item, group, chunk + 8 * n, me.lane >> 4) = word;
      }
      if (chunk == 0 && me.col == 0)
        p.lse[(i64)token_of(p, item) * p.head_tiles * kHeads + head0 + head] =
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
  bar_sync(kBarPrefetch, 3 * kRoleThreads);
  prefetch_rows(p, smem, 0, 4 * half + warp, me.lane);
  mbar_wait(smem + kBarTileFull, 0);  // the first tile and Q come before the next blocks
#pragma unroll 1
  for (int b = 1; b < kPrefetch; b++) prefetch_rows(p, smem, b, 4 * half + warp, me.lane);
#pragma unroll 1
  for (int item = first_item; item < p.items; item += item_step, turn++) {
    if (half == 0 && me.warp == 0 && me.lane == 0 && item + item_step < p.items)
      out.prefetch_q(item + item_step);
    forget(out.o[0]);
    forget(out.o[1]);
    bool first = true, last;
#pragma unroll 1
    do {
      const u32 tile = block & 1;
      mbar_wait(smem + kBarProbsFull + 8 * tile, (block >> 1) & 1);
      last = load_shared(smem + kSmemMeta + (block % kSlots) * 4) & kMetaLast;
      out.accumulate(block, first);
      first = false;
      prefetch_rows(p, smem, block + kPrefetch, 4 * half + warp, me.lane);
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
