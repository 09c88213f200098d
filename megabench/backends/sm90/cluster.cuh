// The reduction of an item over a cluster: who finishes what, where partial results are, and how
// they are added up.
#pragma once

#include "store.cuh"

// The halves of cluster_meet.
DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What a CTA of a cluster finishes, in units: a 32-dim chunk of a wo_a group (eight heads), and the
// chunk 256 dims further on. A replica has its share of the chunks, of all groups, so that every
// warp sends; of its n units, unit u belongs to rank u * split / n.
constexpr int kUnitChunks = kOutChunks / 2;
constexpr int kMostRanks = 16;  // of a cluster
struct Share {
  int chunk0, chunks;  // of the replica, of each group
  int bits;            // log2 of its units
  int unit0, owned;    // this rank's
  int places;          // unit u's place in its owner's memory is u & places

  DEVICE Share(const Params& p, int rank) {
    const int split = p.split;
    chunks = quotient(kUnitChunks, p.replicas);
    chunk0 = (blockIdx.y & (p.replicas - 1)) * chunks;
    const int units = kGroups * chunks;
    bits = 31 - __clz(units);
    unit0 = quotient(units * rank + split - 1, split);
    owned = quotient(units * (rank + 1) + split - 1, split) - unit0;
    places = (1 << (32 - __clz(quotient(units - 1, split)))) - 1;
  }
};

// Whether no CTA of a cluster has more than one block, nor more than two units: then tile 1 is free
// for partial results and the cluster meets when it starts.
DEVICE bool meets_early(const Params& p) {
  const int blocks = (p.topk[0] + kBlock - 1) / kBlock + (p.topk[1] + kBlock - 1) / kBlock;
  return kClustered && blocks <= p.split && kGroups * kUnitChunks <= 2 * p.split * p.replicas;
}
DEVICE void arrive_early(const Params& p) {
  if (meets_early(p)) cluster_arrive();
}
// Waits until every CTA has memory free for partial results.
DEVICE void meet(const Params& p) {
  if (!meets_early(p)) cluster_arrive();
  cluster_wait();
}
// Where partial results are: outputs ([unit][half][rank] fragments of 1 KB), in place of Q and the
// tiles or in tile 1; and (reference, sum) [rank][head], in place of the staging ring or behind.
DEVICE u32 parts_at(const Params& p) { return meets_early(p) ? kSmemKV + kTileBytes : kSmemQ; }
DEVICE u32 stats_at(const Params& p) {
  return meets_early(p) ? kSmemKV + 2 * kTileBytes - kMostRanks * kHeads * 8 : kSmemRaw;
}

// What all ranks have sent of one chunk, added up: `stats` and `part` are rank 0's, of this lane.
struct Sum {
  float reference = kNoReference, sum = 0.f;
  Chunk c[1] = {};

  template <int AtOnce> DEVICE void add(const float2* stats, const float* part, int split) {
#pragma unroll 1
    for (int s = 0; s < split; s += AtOnce)
#pragma unroll
      for (int i = 0; i < AtOnce; i++) reference = fmaxf(reference, stats[(s + i) * kHeads].x);
#pragma unroll 1
    for (int s = 0; s < split; s += AtOnce)
#pragma unroll
      for (int i = 0; i < AtOnce; i++) {
        const float2 t = stats[(s + i) * kHeads];
        const float4 a = *(const float4*)(part + (s + i) * 256);
        const float4 b = *(const float4*)(part + (s + i) * 256 + 128);
        const float weight = exp2_approx(t.x - reference);
        float* v = c[0].v;
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
  }
};

// Adds up chunk k of this CTA's units, from the partial results of all ranks, and stores it.
DEVICE void add_parts(const Params& p, const u8* mem, Lane me, int item, const Share& share,
                      int k) {
  const int unit = share.unit0 + (k >> 1), side = k & 1;
  const int chunk = share.chunk0 + (unit & (share.chunks - 1)) + side * kUnitChunks;
  const int group = unit >> (share.bits - 3), head = group * kWvGroup + me.row;
  const float2* stats = (const float2*)(mem + stats_at(p)) + head;
  const float* part = (const float*)(mem + parts_at(p)) +
                      ((unit & share.places) * 2 + side) * p.split * 256 + me.lane * 4;
  const float sink = ((const float*)(mem + kSmemSink))[first_head(p, item) + head];
  Sum all;
  if (p.split % 5 == 0) all.add<5>(stats, part, p.split);
  else if (p.split % 2 == 0) all.add<2>(stats, part, p.split);
  else all.add<1>(stats, part, p.split);
  Chunk(&c)[1] = all.c;
  const float reference = all.reference, sum = all.sum;
  if (chunk >= kOutChunks - 2)
    rotate_back(c[0], (const float*)(mem + kSmemCosSin), chunk - (kOutChunks - 2), me.col);
  u32 byte[1];
  quantize<1>(c, {inverse_sum(reference, sum, sink)},
              {chunk_out(p, item, group, chunk) + code_offset(me)}, byte, me.col);
  const u32 word = join_heads(byte[0], me.row);
  if ((me.lane & 15) == 0) *scale_out(p, item, group, chunk, me.lane >> 4) = word;
  if (chunk == 0 && me.col == 0)
    p.lse[(i64)token_of(p, item) * p.head_tiles * kHeads + first_head(p, item) + head] =
        natural_lse(reference, sum);
}
