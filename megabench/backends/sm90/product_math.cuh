// The math role of the product: weights to bf16 fragments, wgmma, the sums of a cluster, the store.
#pragma once

#include "product_feed.cuh"

// `bytes` of this CTA's shared memory to a place and a barrier of the cluster's.
DEVICE void bulk_send(u32 dst, u32 src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(dst), "r"(src), "r"(bytes), "r"(bar)
      : "memory");
}
DEVICE void store_global2(void* p, u32 x, u32 y) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x), "r"(y) : "memory");
}

struct Math {
  const Params& p;
  u8* mem;
  u32 smem;
  const Part& part;
  int lane, col;           // col = lane % 4
  int row;                 // the first of the lane's two rows: a fragment's rows r and r + 8 are
                           // neighbours of the weight
  float acc[kTokens / 2];
  WRing ring;
  OperandRing operands;
  u32 multiplied = 0;      // the operand before

  DEVICE Math(const Params& params, u8* mem_, const Part& part_, int group, int warp)
      : p(params), mem(mem_), smem(smem_address(mem_)), part(part_), lane(lane_id()),
        col(lane & 3) {
    const int r = lane >> 2;  // the quarters of a warp read rows that lie four apart (spread)
    row = group * 64 + warp * 16 + 2 * ((r & 4) | (r & 1) << 1 | (r & 2) >> 1);
  }

  using Fragments = u32[4][4];  // of half a stage: four steps of wgmma
  struct Raw {
    u32 codes[2][4], scales[2];
  };

  DEVICE void load_codes(int half, Raw& raw) const {
    const u32 at = smem + kSmemW + ring.slot * kWBytes + row * kColumns;
#pragma unroll
    for (int r = 0; r < 2; r++)
      load_shared4(at + r * kColumns + ((4 * half + col ^ (row & 7) + r) << 4), raw.codes[r]);
  }
  DEVICE void load_stage(Raw& raw) const {
    mbar_wait(smem + kBarW + 8 * ring.slot, ring.parity);
    load_codes(0, raw);
    load_shared2(smem + kSmemW + ring.slot * kWBytes + kWScales + row * 4, raw.scales[0],
                 raw.scales[1]);
  }

  DEVICE void widen_half(int half, const Raw& raw, bool large, Fragments& a) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 factor = first_factor(scale_of(raw, r, half));
#pragma unroll
      for (int s = 0; s < 4; s++) widen(raw.codes[r][s], factor, a[s][r], a[s][r + 2]);
    }
    if (large)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 rest = rest_factor(scale_of(raw, r, half));
#pragma unroll
        for (int s = 0; s < 4; s++) {
          a[s][r] = mul_bf16x2(a[s][r], rest);
          a[s][r + 2] = mul_bf16x2(a[s][r + 2], rest);
        }
      }
  }
  DEVICE u32 scale_of(const Raw& raw, int r, int half) const {
    return raw.scales[r] >> (half * 16 + (col & 2) * 4) & 0xff;
  }

  DEVICE void free_operand() const {
    if (lane == 0) mbar_arrive(smem + kBarOperandFree + 8 * multiplied);
  }

  // The barriers that no ring of codes has.
  DEVICE void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kBuffers; i++) {
        mbar_init(smem + kBarOperand + 8 * i, 4 * kConvertGroups);
        mbar_init(smem + kBarOperandFree + 8 * i, 4 * kRowGroups);
      }
      mbar_init(smem + kBarOthers, 1);
      if (kSplit > 1) mbar_arrive_expect(smem + kBarOthers, (kSplit - 1) * kSumBytes);
      fence_barriers();
    }
    __syncwarp();
  }

  // acc (+)= half a stage, started; the half before has then been multiplied.
  DEVICE void multiply_half(int half, const Fragments& a, bool first) {
    const u64 b =
        tile_descriptor<128>(smem + operands.slot * kOperandBytes + half * kTokens * 128, 16);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; s++)
      wgmma_from_registers<kTokens>(acc, a[s], b + descriptor_step(s * 32),
                                    !(first && half == 0 && s == 0));
    wgmma_commit();
    wgmma_wait<1>();
  }

  // Half a stage is widened while the half before is multiplied.
  DEVICE void multiply() {
    if (part.first >= part.last) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; i++) acc[i] = 0;
      return;
    }
    Raw raw;
    Fragments a[2];
    load_stage(raw);
#pragma unroll 1
    for (int word = part.first; word < part.last; word++, operands.advance()) {
      const bool first = word == part.first;
      const bool large = __any_sync(~0u, has_large(raw.scales[0] | raw.scales[1]));
      widen_half(0, raw, large, a[0]);
      load_codes(1, raw);
      mbar_wait(smem + kBarOperand + 8 * operands.slot, operands.parity);
      multiply_half(0, a[0], first);
      if (!first) free_operand();  // the stage before has been multiplied
      multiplied = operands.slot;
      widen_half(1, raw, large, a[1]);
      __syncwarp();
      if (lane == 0) mbar_arrive(smem + kBarWFree + 8 * ring.slot);
      ring.advance();
      if (word + 1 < part.last) load_stage(raw);
      multiply_half(1, a[1], first);
    }
    wgmma_wait<0>();
    pin(acc);
  }

  // The sums as floats [token][row] in shared memory.
  DEVICE void write_sums() const {
    u8* at = mem + 2 * col * kPitch + row * 4;
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        *(float2*)(at + (8 * j + i) * kPitch) = make_float2(acc[4 * j + i], acc[4 * j + 2 + i]);
  }

  // Each rank gets what the others have of its tokens.
  DEVICE void exchange() const {
    if (threadIdx.x == 0)
#pragma unroll 1
      for (u32 to = 0; to < kSplit; to++)
        if (to != part.rank)
          bulk_send(map_to_rank(smem + kSmemOthers + others(part.rank, to) * kSumBytes, to),
                    smem + to * kSumBytes, kSumBytes, map_to_rank(smem + kBarOthers, to));
    mbar_wait(smem + kBarOthers, 0);
  }
  // The place of `rank`'s sums among those that `at` gets.
  static DEVICE u32 others(u32 rank, u32 at) { return rank - (rank > at); }

  DEVICE void store_tokens() const {
    constexpr int kFours = kRows / 4, kStep = kMathThreads / kFours;
    const Operands& o = p.o;
    const int four = threadIdx.x % kFours * 4, base = part.rank * kOwnTokens;
    const int live = min(kOwnTokens, o.tokens - part.token - base);
    u16* out = o.out + part.group * o.out_group + (part.token + base) * o.out_token + part.row + four;
#pragma unroll 2
    for (int t = threadIdx.x / kFours; t < live; t += kStep) {
      float4 sum = {};
#pragma unroll
      for (u32 rank = 0; rank < kSplit; rank++) {  // in their order
        const u32 from = rank == part.rank ? base * kPitch
                                           : kSmemOthers + others(rank, part.rank) * kSumBytes;
        const float4 v = *(const float4*)(mem + from + t * kPitch + four * 4);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      store_global2(out + t * o.out_token, pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    }
  }

  DEVICE void finish() {
    meet_math();  // no warp of the cluster reads operands any more
    write_sums();
    if (kSplit > 1) fence_async_proxy();
    bar_sync(kBarMath, kMathThreads);
    if (kSplit > 1) exchange();
    store_tokens();
    if (kSplit > 1) cluster_meet();  // nobody leaves while its sums are sent
  }
  static DEVICE void meet_math() {
    if constexpr (kSplit > 1) cluster_meet();
    else bar_sync(kBarMath, kMathThreads);
  }
};
