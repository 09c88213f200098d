// The roles that feed the product: codes and scales into their rings, activations to bf16.
//
// Both operands take the columns of half a stage (64) in one order: lane c of four has 16
// neighbouring columns, and its word s of them makes its share of wgmma's step s.
#pragma once

#include "product.cuh"

constexpr int kLanes = 32;

// Fills a ring: as many stages as it holds before the CTA meets, then one as each comes free.
// `ask(word, slot)` starts a stage's copies.
template <int Stages, class Ask> DEVICE void fill(const Part& t, u32 free_bar, Ask ask) {
  const int ahead = min(t.first + Stages, t.last);
#pragma unroll 1
  for (int word = t.first; word < ahead; word++) ask(word, word - t.first);
  meet();
  Ring<Stages> ring;
#pragma unroll 1
  for (int word = ahead; word < t.last; word++, ring.advance()) {
    mbar_wait(free_bar + 8 * ring.slot, ring.parity);
    ask(word, ring.slot);
  }
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
  fill<kXStages>(t, smem + kBarXFree, [&](int word, int slot) {
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
  fill<kWStages>(t, smem + kBarWFree, [&](int word, int slot) {
    const u32 full = smem + kBarW + 8 * slot, at = smem + kSmemW + slot * kWBytes;
    if (lane == 0) {
      mbar_arrive_expect(full, kRows * kColumns);
      tensor_copy_once(at, &p.w_map, word * kColumns, t.row, t.group, full, policy);
    }
#pragma unroll
    for (int i = 0; i < kRows; i += kLanes)
      copy4(at + kWScales + (i + lane) * 4, scale + word * o.w_scale_word + i * o.w_scale_row);
    arrive_after_copies(full);
  });
}

// Activations -> bf16 operands. A warp has one half of each stage, of every kStep-th eight tokens.
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
  template <bool Large>
  DEVICE void store(const Codes& codes, const Scales& scales, u32 at) const {
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      u32 even[4], odd[4];
      const u32 factor = first_factor(scales[i]);
#pragma unroll
      for (int s = 0; s < 4; s++) {
        widen(codes[i][s], factor, even[s], odd[s]);
        if (Large) {
          even[s] = mul_bf16x2(even[s], rest_factor(scales[i]));
          odd[s] = mul_bf16x2(odd[s], rest_factor(scales[i]));
        }
      }
      const u32 row = at + i * kStep * 8 * 128;
      store_matrix4(row, even[0], odd[0], even[1], odd[1]);
      store_matrix4(row ^ 64, even[2], odd[2], even[3], odd[3]);
    }
  }
  DEVICE void store(const Codes& codes, const Scales& scales, int buffer) const {
    u32 any = 0;
#pragma unroll
    for (int i = 0; i < kUnits; i++) any |= scales[i];
    const u32 at = to + buffer * kOperandBytes;
    if (__any_sync(~0u, has_large(any))) store<true>(codes, scales, at);
    else store<false>(codes, scales, at);
  }
};

DEVICE void convert_role(const Params& p, u32 smem, int warp, const Part& t) {
  const Converter converter(smem, warp);
  const int lane = lane_id();
  XRing ring;
  OperandRing operands;
  Converter::Codes codes;
  Converter::Scales scales;
  meet();
#pragma unroll 1
  for (int word = t.first; word < t.last; word++, ring.advance(), operands.advance()) {
    mbar_wait(smem + kBarX + 8 * ring.slot, ring.parity);
    converter.load(ring.slot, codes, scales);
    mbar_wait(smem + kBarOperandFree + 8 * operands.slot, operands.parity ^ 1);
    converter.store(codes, scales, (int)operands.slot);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      mbar_arrive(smem + kBarOperand + 8 * operands.slot);
      mbar_arrive(smem + kBarXFree + 8 * ring.slot);
    }
  }
}
