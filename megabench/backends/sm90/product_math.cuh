// The math role of the product: weights to bf16 fragments, wgmma, the sums of a cluster, the store.
#pragma once

#include "fragments.cuh"
#include "product.cuh"

enum NamedBarrier { kBarMath = 1 };

DEVICE u32 transpose8x8(u32 pairs) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pairs));
  return r;
}
DEVICE void load_remote4(u32 a, float (&v)[4]) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(a)
               : "memory");
}

struct Math {
  const Params& p;
  u32 smem;
  int lane, row, col;      // row = lane / 4, col = lane % 4: the place in a fragment
  int first_row;           // the warp's first row in the tile
  int turn;                // which stages are its own
  float acc[kTokens / 2];
  StageRing ring;
  OperandRing operands;
  u32 multiplied = 0;      // operand slot of the stage before

  DEVICE Math(const Params& params, u32 smem_, int group, int warp)
      : p(params), smem(smem_), lane(lane_id()), row(lane >> 2), col(lane & 3),
        first_row(group % kRowGroups * 64 + warp * 16), turn(group / kRowGroups) {
    ring.advance(turn);
    operands.advance(turn);
  }

  // acc (+)= one stage. Each block is converted while the one before is multiplied.
  DEVICE void stage(bool first) {
    const u32 raw =
        smem + ring.slot * kRawBytes + (first_row + row) * kColumns + (row << 4) + col * 4;
    const u32 at = smem + kSmemScales + ring.slot * kScaleBytes + (first_row + row) * 4;
    mbar_wait(smem + kBarFull + 8 * ring.slot, ring.parity);
    const u32 scales[2] = {load_shared(at), load_shared(at + 32)};
    Codes codes;
    Fragments a[2];
    load_codes(0, raw, codes);
    const bool large = __any_sync(~0u, has_large(scales[0] | scales[1]));
    const u64 b = tile_descriptor<128>(smem + kSmemOperand + operands.slot * kOperandBytes, 16);
#pragma unroll
    for (int q = 0; q < kBlocks; q++) {
      widen_block(q, codes, scales, large, a[q & 1]);
      if (q < kBlocks - 1) {
        load_codes(q + 1, raw, codes);
      } else {
        __syncwarp();
        if (lane == 0) mbar_arrive(smem + kBarFree + 8 * ring.slot);
      }
      if (q == 0) mbar_wait(smem + kBarOperandFull + 8 * operands.slot, operands.parity);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; step++)
        wgmma_from_registers<kTokens>(
            acc, a[q & 1][step],
            b + descriptor_step((q >> 1) * kTokens * 128 + (q & 1) * 64 + step * 32),
            !(first && q == 0 && step == 0));
      wgmma_commit();
      wgmma_wait<1>();
      if (q == 0 && !first) free_operand();  // the stage before has been multiplied
    }
    multiplied = operands.slot;
    ring.advance(kTurns);
    operands.advance(kTurns);
  }

  DEVICE void free_operand() const {
    if (lane == 0) mbar_arrive(smem + kBarOperandFree + 8 * multiplied);
  }

  DEVICE void multiply(const Share& share) {
    const int first = share.first_word + turn;
    if (first >= share.last_word) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; i++) acc[i] = 0;
      return;
    }
#pragma unroll 1
    for (int word = first; word < share.last_word; word += kTurns) stage(word == first);
    wgmma_wait<0>();
    pin(acc);
    free_operand();
  }

  // bf16, transposed to [token][row] eight by eight.
  DEVICE void store(const Tile& t) const {
    const int live = p.tokens - t.token;
    u16* out = p.out + t.group * p.out_group + (t.token + row) * p.out_token + t.row +
               first_row + 2 * col;
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      const u32 low = transpose8x8(pack_bf16(acc[4 * j], acc[4 * j + 1]));
      const u32 high = transpose8x8(pack_bf16(acc[4 * j + 2], acc[4 * j + 3]));
      if (8 * j + row < live) {
        *(u32*)out = low;
        *(u32*)(out + 8) = high;
      }
      out += 8 * p.out_token;
    }
  }

  // This thread's partial sums in shared memory; the pitch keeps fragments apart.
  template <class Visit> DEVICE void visit_partial(u8* partial, Visit visit) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        visit(acc[4 * j + i],
              *(float*)(partial + (8 * j + 2 * col + (i & 1)) * kPartialPitch +
                        (first_row + row + (i >> 1) * 8) * 4));
  }
  // The sums of all turns, in the first turn's registers.
  DEVICE void add_turns(u8* mem) {
    bar_sync(kBarMath, kMathGroups * kGroup);  // no warp reads operands any more
    if (kTurns == 1) return;
    if (turn > 0)
      visit_partial(mem + (turn - 1) * kPartialBytes,
                    [](float mine, float& there) { there = mine; });
    bar_sync(kBarMath, kMathGroups * kGroup);
    if (turn == 0)
      for (int other = 0; other < kTurns - 1; other++)
        visit_partial(mem + other * kPartialBytes, [](float& mine, float there) { mine += there; });
  }
  DEVICE void store_partial(u8* mem) {
    if (turn == 0) visit_partial(mem, [](float mine, float& there) { there = mine; });
  }
};

// Adds the cluster's partial sums in the order of ranks. Each CTA takes a share of the rows.
DEVICE void add_partials(const Params& p, u32 smem, const Tile& t, const Share& share) {
  const int live = min(p.tokens - t.token, kTokens);
  const int rows = kRows / p.split, octets = rows / 8;  // split is a power of two up to 8
  for (int i = threadIdx.x; i < live * octets; i += kMathGroups * kGroup) {
    const int token = i / octets, r = share.rank * rows + i % octets * 8;
    float sum[8] = {};
    for (int rank = 0; rank < p.split; rank++) {
      const u32 from = map_to_rank(smem + token * kPartialPitch + r * 4, rank);
      float lo[4], hi[4];
      load_remote4(from, lo);
      load_remote4(from + 16, hi);
#pragma unroll
      for (int e = 0; e < 4; e++) sum[e] += lo[e], sum[e + 4] += hi[e];
    }
    *(uint4*)(p.out + t.group * p.out_group + (t.token + token) * p.out_token + t.row + r) =
        make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                   pack_bf16(sum[6], sum[7]));
  }
}
