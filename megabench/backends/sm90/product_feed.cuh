// The roles that feed the product: codes and scales into their rings, activations to f16 or bf16.
//
// Both operands take the columns of half a stage (64) in one order: lane c of four has 16
// neighbouring columns, and its word s of them makes its share of wgmma's step s.
#pragma once

#include "product.cuh"

constexpr int kLanes = 32, kPace = 1300;
DEVICE void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// Fills a ring, a stage as each comes free; again, if the roles go over the columns again.
// `ask(word, slot)` starts a stage's copies. `Ahead` stages are asked for before the CTA meets, the
// others that the ring has room for `Pace` cycles apart, so that no CTA's first stage is behind all
// of them.
template <int Stages, int Ahead, int Pace, class Ask>
DEVICE void fill(const Part& t, u32 smem, u32 free_bar, Ask ask) {
  const u32 start = (u32)clock();
  Ring<Stages> ring;
  const auto feed = [&](int word, int end) {
#pragma unroll 1
    for (; word < end; word++, ring.advance()) {
      const int i = word - t.first;
      if (Pace > 0 && i < Stages)
        while ((u32)clock() - start < (u32)(i * Pace)) {}
      mbar_wait(free_bar + 8 * ring.slot, ring.parity ^ 1);
      ask(word, ring.slot);
    }
  };
  const int ahead = min(t.first + Ahead, t.last);
  feed(t.first, ahead);
  __syncwarp();  // one lane may be behind, asking
  meet();
  feed(ahead, t.last);
  if (again(smem)) feed(t.first, t.last);
}

// One warp has L2 fetch lines of all that the first stages need: their pages' translations, which
// take longer than a read, are then under way before the copy engine asks.
DEVICE void prefetch_start(const Params& p, const Part& t) {
  if (t.first >= t.last) return;
  const Operands& o = p.o;
  const int lane = threadIdx.x % kLanes, fourth = lane % 4 * 32;
  const int word = min(t.first + lane / 4, t.last - 1), last = o.tokens - 1;
  prefetch_line(o.w + t.group * o.w_group + (t.row + 4 * lane) * o.w_row + t.first * kColumns);
  prefetch_line(o.x + t.group * o.x_group + min(t.token + 4 * lane, last) * o.x_token +
                t.first * kColumns);
  prefetch_line(o.w_scale + t.group * o.w_scale_group + (t.row + fourth) * o.w_scale_row +
                word * o.w_scale_word);
  prefetch_line(o.x_scale + t.group * o.x_scale_group +
                min(t.token + fourth, last) * o.x_scale_token + word * o.x_scale_word);
}

// One warp for activations. Tokens past the last become zeros, unread.
DEVICE void load_activations(const Params& p, u32 smem, const Part& t) {
  const Operands& o = p.o;
  const int lane = lane_id(), live = o.tokens - t.token - lane;
  const u32* scale = o.x_scale + t.group * o.x_scale_group + (t.token + lane) * o.x_scale_token;
  if (lane == 0) {
    for (int i = 0; i < kXStages; i++) {
      mbar_init(smem + kBarX + 8 * i, kFullArrivals);
      mbar_init(smem + kBarXFree + 8 * i, 4 * kConvertGroups);
    }
    fence_barriers();
  }
  __syncwarp();
  fill<kXStages, 1, 0>(t, smem, smem + kBarXFree, [&](int word, int slot) {
    const u32 full = smem + kBarX + 8 * slot, at = smem + kSmemX + slot * kXBytes;
    if (lane == 0) {
      mbar_arrive_expect(full, kTokens * kColumns);
      tensor_copy(at, &p.x_map, word * kColumns, t.group, t.token, full);
    }
#pragma unroll
    for (int i = 0; i < kTokens; i += kLanes)
      if (i + lane < kTokens)
        copy4(at + kXScales + (i + lane) * 4, scale + word * o.x_scale_word + i * o.x_scale_token,
              i < live ? 4 : 0);
    arrive_after_copies(full);
  });
}

// One warp for the weight, which every tile of tokens reads.
DEVICE void load_weight(const Params& p, u32 smem, const Part& t) {
  const Operands& o = p.o;
  const int lane = lane_id();
  const u32* scale = o.w_scale + t.group * o.w_scale_group + (t.row + lane) * o.w_scale_row;
  const u64 policy = once_policy();
  if (lane == 0) {
    for (int i = 0; i < kWStages; i++) {
      mbar_init(smem + kBarW + 8 * i, kFullArrivals);
      mbar_init(smem + kBarWFree + 8 * i, 4 * kRowGroups);
    }
    fence_barriers();
  }
  __syncwarp();
  fill<kWStages, 1, kPace>(t, smem, smem + kBarWFree, [&](int word, int slot) {
    const u32 full = smem + kBarW + 8 * slot, at = smem + kSmemW + slot * kWBytes;
    if (lane == 0) {
      mbar_arrive_expect(full, kRows * kColumns);
#pragma unroll
      for (int row = 0; row < kRows; row += kBoxRows)
        tensor_copy_once(at + row * kColumns, &p.w_map, word * kColumns, t.row + row, t.group, full,
                         policy);
    }
#pragma unroll
    for (int i = 0; i < kRows; i += kLanes)
      copy4(at + kWScales + (i + lane) * 4, scale + word * o.w_scale_word + i * o.w_scale_row);
    arrive_after_copies(full);
  });
}

// Activations -> operands. A warp has one half of each stage, of every kStep-th eight tokens.
struct Converter {
  static constexpr int kStep = 2 * kConvertGroups, kUnits = kTokens / 8 / kStep;
  u32 from, scale_from, to;

  DEVICE Converter(u32 smem, int warp) {
    const int lane = lane_id(), c = lane & 3, half = warp & 1, eight = (warp >> 1) * 8;
    const int row = spread(lane >> 2), to_row = spread(lane & 7);
    from = smem + kSmemX + (eight + row) * kColumns + ((4 * half + c ^ row) << 4);
    scale_from = smem + kSmemX + kXScales + (eight + row) * 4 + 2 * half + (c >> 1);
    // where this lane's row of stmatrix begins: a quarter of the lanes each has one matrix
    to = smem + half * kTokens * 128 + (eight + to_row) * 128 + ((lane >> 3 ^ to_row) << 4);
  }

  using Codes = u32[kUnits][4];
  using Scales = u32[kUnits];
  DEVICE void load(int slot, Codes& codes, Scales& scales) const {
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      load_shared4(from + slot * kXBytes + i * kStep * 8 * kColumns, codes[i]);
      scales[i] = load_shared_byte(scale_from + slot * kXBytes + i * kStep * 32);
    }
  }
  DEVICE void store_unit(int i, int buffer, const u32 (&first)[4], const u32 (&second)[4]) const {
    const u32 row = to + buffer * kOperandBytes + i * kStep * 8 * 128;
    store_matrix4(row, first[0], second[0], first[1], second[1]);
    store_matrix4(row ^ 64, first[2], second[2], first[3], second[3]);
  }
  DEVICE void store_f16(const Codes& codes, const Scales& scales, int buffer, u32 smem) const {
    u32 furthest = 0, factor[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      furthest = max(furthest, scales[i] - kFirst);
      factor[i] = f16_factor(scales[i]);
    }
    if (__any_sync(~0u, furthest > kLast - kFirst)) {
      bool lost = false;
#pragma unroll
      for (int i = 0; i < kUnits; i++)
        if (is_far(scales[i])) factor[i] = 0, lost |= any_value(codes[i]);
      if (lost) ask_again(smem);
    }
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      u32 first[4], second[4];
#pragma unroll
      for (int s = 0; s < 4; s++) to_f16(codes[i][s], factor[i], first[s], second[s]);
      store_unit(i, buffer, first, second);
    }
  }
  DEVICE void store_bf16(const Codes& codes, const Scales& scales, int buffer) const {
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      u32 first[4], second[4];
#pragma unroll
      for (int s = 0; s < 4; s++) widen_any(codes[i][s], scales[i], first[s], second[s]);
      store_unit(i, buffer, first, second);
    }
  }
};

// All columns, to f16 or to bf16. Codes and operands have rings of the same length.
template <bool F16>
DEVICE void convert(const Converter& converter, u32 smem, bool first_lane, const Part& t,
                    OperandRing& ring) {
  Converter::Codes codes;
  Converter::Scales scales;
#pragma unroll 1
  for (int word = t.first; word < t.last; word++, ring.advance()) {
    mbar_wait(smem + kBarX + 8 * ring.slot, ring.parity);
    converter.load(ring.slot, codes, scales);
    mbar_wait(smem + kBarOperandFree + 8 * ring.slot, ring.parity ^ 1);
    if (F16) converter.store_f16(codes, scales, (int)ring.slot, smem);
    else converter.store_bf16(codes, scales, (int)ring.slot);
    fence_async_proxy();
    __syncwarp();
    if (first_lane) {
      mbar_arrive(smem + kBarOperand + 8 * ring.slot);
      mbar_arrive(smem + kBarXFree + 8 * ring.slot);
    }
  }
}
DEVICE void convert_role(u32 smem, int warp, const Part& t) {
  const Converter converter(smem, warp);
  const bool first_lane = lane_id() == 0;
  OperandRing ring;
  meet();
  convert<true>(converter, smem, first_lane, t, ring);
  if (again(smem)) convert<false>(converter, smem, first_lane, t, ring);
}
