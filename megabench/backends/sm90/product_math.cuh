// The math role of the product: weights to fragments, wgmma, the sums of a cluster, the store.
#pragma once

#include "product_feed.cuh"

// N floats to a place of the cluster's shared memory, counted on a barrier there.
#define SEND "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
template <int N> DEVICE void send(u32 to, const float* v, u32 bar) {
  if constexpr (N == 4)
    asm volatile(SEND ".v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v[0]), "f"(v[1]),
                 "f"(v[2]), "f"(v[3]), "r"(bar)
                 : "memory");
  else if constexpr (N == 2)
    asm volatile(SEND ".v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(v[0]), "f"(v[1]), "r"(bar)
                 : "memory");
  else
    asm volatile(SEND ".f32 [%0], %1, [%2];" ::"r"(to), "f"(v[0]), "r"(bar) : "memory");
}

template <int By, int N> DEVICE void move_down(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i + By < N; i++) v[i] = v[i + By];
}

struct Math {
  const Params& p;
  const u8* mem;
  u32 smem;
  const Part& part;
  int lane, col;           // col = lane % 4
  int row;                 // the first of the lane's two rows: a fragment's rows r and r + 8 are
                           // neighbours of the weight
  u32 codes_at[2][2];      // in a stage: of half h and row r; no half's address is a sum
  u32 scales_at;
  u32 factor_bytes[2];     // of half h: its factor's place in a row's four, for __byte_perm
  float acc[kTokens / 2];
  WPlace w;
  XPlace x;

  DEVICE Math(const Params& params, const u8* mem_, const Part& part_, int group, int warp)
      : p(params), mem(mem_), smem(smem_address(mem_)), part(part_), lane(lane_id()),
        col(lane & 3), w(smem), x(smem) {
    const int r = lane >> 2;  // the quarters of a warp read rows that lie four apart (spread)
    row = group * 64 + warp * 16 + 2 * ((r & 4) | (r & 1) << 1 | (r & 2) >> 1);
    scales_at = kWScales + row * 4;
    keep(scales_at);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        codes_at[h][i] = (row + i) * kColumns + ((4 * h + col ^ (row & 7) + i) << 4);
        keep(codes_at[h][i]);
      }
      factor_bytes[h] = 0x0404 + 0x1010 * (2 * h + (col >> 1));
      keep(factor_bytes[h]);
    }
  }

  using Fragments = u32[4][4];  // of half a stage: four steps of wgmma
  struct Raw {
    u32 codes[2][4], scales[2];
  };

  DEVICE void load_codes(int half, Raw& raw) const {
#pragma unroll
    for (int r = 0; r < 2; r++) load_shared4(w.at + codes_at[half][r], raw.codes[r]);
  }
  DEVICE void load_stage(Raw& raw) const {
    mbar_wait(w.at + kWFull, w.parity);
    load_shared2(w.at + scales_at, raw.scales[0], raw.scales[1]);
    load_codes(0, raw);
  }

  template <bool F16> DEVICE void to_fragments(int half, const Raw& raw, Fragments& a) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 factor = __byte_perm(raw.scales[r], 0, factor_bytes[half]);
      const u32 scale = raw.scales[r] >> (half * 16 + (col & 2) * 4) & 0xff;
#pragma unroll
      for (int s = 0; s < 4; s++)
        if constexpr (F16) to_f16(raw.codes[r][s], factor, a[s][r], a[s][r + 2]);
        else widen_any(raw.codes[r][s], scale, a[s][r], a[s][r + 2]);
    }
  }

  // The barriers that no loader has.
  DEVICE void init_barriers() const {
    if (threadIdx.x == 0) {
      for (u32 at = smem; at < smem + kXStages * kXBytes; at += kXBytes) {
        mbar_init(at + kOperandFree, 4 * kRowGroups);
      }
      for (int i = 0; i < kParts; i++) {
        mbar_init(smem + kBarOthers + 8 * i, 1);
        if (kSplit > 1)
          mbar_arrive_expect(smem + kBarOthers + 8 * i, (kSplit - 1) * kPartBytes);
      }
      store_shared(smem + kAgain, 0);
      fence_barriers();
    }
    __syncwarp();
  }

  // acc (+)= half a stage, started; the half before has then been multiplied.
  template <bool F16> DEVICE void multiply_half(int half, const Fragments& a, bool first) {
    const u64 b = tile_descriptor<128>(x.at + half * kTokens * 128, 16);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; s++)
      wgmma_from_registers<kTokens, F16>(acc, a[s], b + descriptor_step(s * 32),
                                         !(first && half == 0 && s == 0));
    wgmma_commit();
    wgmma_wait<1>();
  }

  // All columns. Half a stage is converted while the half before is multiplied.
  template <bool F16> DEVICE void multiply() {
    Raw raw;
    Fragments a[2];
    const bool first_lane = lane == 0;
    bool before = false;
    u32 multiplied = 0;            // the operand before, if there was one
    load_stage(raw);
#pragma unroll 1
    for (int word = part.first; word < part.last; word++, x.advance()) {
      to_fragments<F16>(0, raw, a[0]);
      load_codes(1, raw);
      mbar_wait(x.at + kOperandFull, x.parity);
      multiply_half<F16>(0, a[0], word == part.first);
      if (before && first_lane) mbar_arrive(multiplied + kOperandFree);
      before = true, multiplied = x.at;
      to_fragments<F16>(1, raw, a[1]);
      __syncwarp();
      if (first_lane) mbar_arrive(w.at + kWFree);
      w.advance();
      if (word + 1 < part.last) load_stage(raw);
      multiply_half<F16>(1, a[1], false);
    }
    wgmma_wait<0>();
    pin(acc);
    if (before && first_lane) mbar_arrive(multiplied + kOperandFree);
  }

  // In f16, or else again in bf16. Returns the sums' unit. What is sent early has been sent then.
  DEVICE float multiply_all() {
    const bool any = part.first < part.last;
    if (any) {
      multiply<true>();
    } else {
#pragma unroll
      for (int i = 0; i < kTokens / 2; i++) acc[i] = 0;
    }
    if (!again(smem, [&] { send_early(); })) return kUnitOfProducts;
    if (kEarly && threadIdx.x == 0) {  // the first part comes again
      mbar_wait(smem + kBarOthers, 0);
      mbar_arrive_expect(smem + kBarOthers, kPartBytes);
    }
    if (any) multiply<false>();
    if constexpr (kSplit > 1) cluster_meet();  // no rank reads operands any more
    send_early();
    return 1;
  }

  // Ranks share out each thread's sums: rank r's are those from the r kOwn-th on. In this order two
  // rows of a token are neighbours.
  static DEVICE constexpr int place(int i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }
  static constexpr int kChunk = kOwn < 4 ? kOwn : 4, kPart = kOwn / kParts;
  using Own = float[kOwn];
  // Where `rank`'s sums are among those that `at` gets.
  DEVICE u32 others(u32 rank, u32 at) const {
    const u32 i = kSplit == 2 ? 0 : rank - (rank > at);
    return i % kXStages * kXBytes + i / kXStages * kSumBytes + threadIdx.x * 4 * kChunk;
  }

  DEVICE u32 first_part() const { return kFirstPart + threadIdx.x * 4 * kChunk; }

  // Chunks from `From` to `To` of those that are `rank`'s.
  template <int From, int To, int N>
  DEVICE void send_to(u32 rank, u32 at, const float (&sums)[N]) const {
    at = map_to_rank(smem + at, rank);
    const u32 bar = map_to_rank(smem + kBarOthers, rank);
#pragma unroll
    for (int e = From; e < To; e += kChunk)
      send<kChunk>(at + e * 4 * kMathThreads, sums + e, bar + e / kPart * 8);
  }
  DEVICE void send_early() const {
    if constexpr (kEarly) {
      float sums[kPart];
#pragma unroll
      for (int e = 0; e < kPart; e++) sums[e] = part.rank ? acc[place(e)] : acc[place(kOwn + e)];
      send_to<0, kPart>(part.rank ^ 1, first_part(), sums);
    }
  }
  // Sends others theirs, but for what was sent early, and returns this rank's.
  DEVICE void share_out(Own& own) const {
    float sums[kTokens / 2];
#pragma unroll
    for (int i = 0; i < kTokens / 2; i++) sums[i] = acc[place(i)];
    constexpr int kAtOnce = kSplit == 2 ? 2 : 1;
#pragma unroll kAtOnce
    for (u32 rank = 0; rank < kSplit; rank++) {
      if (rank != part.rank) {
        send_to<kEarly ? kPart : 0, kOwn>(rank, others(part.rank, rank), sums);
      } else {
#pragma unroll
        for (int e = 0; e < kOwn; e++) own[e] = sums[e];
      }
      move_down<kOwn>(sums);
    }
  }
  // Adds all ranks' sums of a chunk, in their order, which makes no difference to two. `e`: its
  // place among the CTA's.
  DEVICE void add_chunk(int e, const float* own, float (&total)[kChunk]) const {
    struct alignas(4 * kChunk) Chunk {
      float v[kChunk];
    };
    const auto theirs = [&](u32 rank) {
      const u32 at = kEarly && e < kPart ? first_part() : others(rank, part.rank);
      return *(const Chunk*)(mem + at + e * 4 * kMathThreads);
    };
    Chunk other = {};
    if constexpr (kSplit <= 2) {
      if (kSplit == 2) other = theirs(part.rank ^ 1);
#pragma unroll
      for (int k = 0; k < kChunk; k++) total[k] = own[k] + other.v[k];
    } else {
#pragma unroll
      for (int k = 0; k < kChunk; k++) total[k] = 0;
#pragma unroll
      for (u32 rank = 0; rank < kSplit; rank++) {
        if (rank != part.rank) other = theirs(rank);
#pragma unroll
        for (int k = 0; k < kChunk; k++) total[k] += rank == part.rank ? own[k] : other.v[k];
      }
    }
  }
  // `out`: of the lane's two rows and the part's first token; `live` tokens are there. `e`: a
  // chunk's place in the part.
  DEVICE void store_chunk(int e, const float (&total)[kChunk], float unit, u16* out,
                          int live) const {
    const int first = part.rank * kOwn;
#pragma unroll
    for (int k = 0; k < kChunk; k += 2) {
      const int at = kOwn < 4 ? first % 4 + k : e + k, token = at / 4 * 8 + (at >> 1 & 1);
      if (token >= live) continue;
      u16* to = out + token * p.o.out_token;
      if constexpr (kOwn > 1) *(u32*)to = pack_bf16(total[k] * unit, total[k + 1] * unit);
      else to[first & 1] = (u16)pack_bf16(total[k] * unit, 0);
    }
  }
  // A part is added and stored while the next ones arrive. A loop, whose registers move: four parts
  // in a row would be fetched, each for the first time.
  DEVICE void finish(float unit) const {
    const bool second = unit == 1;
    Own own;
    share_out(own);
    const int first_token = part.token + part.rank * kOwn / 4 * 8 + 2 * col;
    u16* out = p.o.out + part.group * p.o.out_group + first_token * p.o.out_token + part.row + row;
    int live = p.o.tokens - first_token;
#pragma unroll 1
    for (int i = 0; i < kParts; i++, out += 2 * kPart * p.o.out_token, live -= 2 * kPart) {
      if constexpr (kSplit > 1) mbar_wait(smem + kBarOthers + 8 * i, kEarly && i == 0 && second);
#pragma unroll
      for (int e = 0; e < kPart; e += kChunk) {
        float total[kChunk];
        add_chunk(i * kPart + e, own + e, total);
        store_chunk(e, total, unit, out, live);
      }
      move_down<kPart>(own);
    }
  }
};
