// The roles that feed the product: codes and scales into their rings, activations to f16 or bf16.
//
// Both operands take the columns of half a stage (64) in one order: lane c of four has 16
// neighbouring columns, and its word s of them makes its share of wgmma's step s.
#pragma once

#include "product_scales.cuh"

constexpr int kPace = 1300;
DEVICE void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// Has a ring's stages filled as they come free, by one warp; again, if the roles go over the columns
// again. `ask(word, stage)` starts the copies of codes, in one thread; `copies()` makes what copies
// scales: their addresses are computed when the first codes are on their way. The first stage is
// asked for before the CTA meets, the others that the ring has room for `Pace` cycles apart, so
// that no CTA's first stage is behind all of them.
template <int Stages, int Pace, u32 Free, class Side, class Copies, class Ask>
DEVICE void fill(const Part& t, u32 smem, Copies copies, Ask ask) {
  const u32 start = (u32)clock();
  typename Side::Place place(smem);
  const bool any = t.first < t.last;
  if (any && elected()) ask(t.first, place.at);
  __syncwarp();
  ScaleCopies<Side> scales = copies();
  if (any) scales.copy(place.at), place.advance();
  meet();
  const auto feed = [&](int word) {
#pragma unroll 1
    for (; word < t.last; word++, place.advance()) {
      const int i = word - t.first;
      if (Pace > 0 && i < Stages)
        while ((u32)clock() - start < (u32)(i * Pace)) {}
      mbar_wait(place.at + Free, place.parity ^ 1);
      if (elected()) ask(word, place.at);
      scales.copy(place.at);
      __syncwarp();
    }
  };
  feed(t.first + 1);
  if (again(smem)) {
    scales.back(t.last - t.first);
    feed(t.first);
  }
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

// One warp for activations. Tokens past the last become zeros, unread. A stage's codes and scales are
// free when it has been converted.
DEVICE void load_activations(const Params& p, u32 smem, const Part& t) {
  const Operands& o = p.o;
  if (lane_id() == 0) {
    for (u32 at = smem; at < smem + kXStages * kXBytes; at += kXBytes) {
      mbar_init(at + kXFull, kFullArrivals);
      mbar_init(at + kXCopied, kLanes);
      mbar_init(at + kOperandFull, 4);  // the warps of one convert warpgroup
    }
    fence_barriers();
  }
  __syncwarp();
  const auto copies = [&] {
    return ScaleCopies<ActivationScales>(o.tokens - t.token,
                                         o.x_scale + t.group * o.x_scale_group +
                                             t.token * o.x_scale_token + t.first * o.x_scale_word,
                                         o.x_scale_token, o.x_scale_word);
  };
  fill<kXStages, 0, kOperandFull, ActivationScales>(t, smem, copies, [&](int word, u32 stage) {
    mbar_arrive_expect(stage + kXFull, kTokens * kColumns);
    tensor_copy(stage + kXCodes, &p.x_map, word * kColumns, t.group, t.token, stage + kXFull);
  });
}

// One warp for the weight, whose codes every tile of tokens reads.
DEVICE void load_weight(const Params& p, u32 smem, const Part& t) {
  const Operands& o = p.o;
  const u64 policy = once_policy();
  if (lane_id() == 0) {
    for (u32 at = smem + kSmemW; at < smem + kSmemW + kWStages * kWBytes; at += kWBytes) {
      mbar_init(at + kWFull, kFullArrivals);
      mbar_init(at + kWCopied, kLanes);
      mbar_init(at + kWFree, 4 * kRowGroups);
    }
    fence_barriers();
  }
  __syncwarp();
  const auto copies = [&] {
    return ScaleCopies<WeightScales>(
        kRows,
        o.w_scale + t.group * o.w_scale_group + t.row * o.w_scale_row + t.first * o.w_scale_word,
        o.w_scale_row, o.w_scale_word);
  };
  fill<kWStages, kPace, kWFree, WeightScales>(t, smem, copies, [&](int word, u32 stage) {
    mbar_arrive_expect(stage + kWFull, kRows * kColumns);
#pragma unroll
    for (int row = 0; row < kRows; row += kBoxRows)
      tensor_copy_once(stage + row * kColumns, &p.w_map, word * kColumns, t.row + row, t.group,
                       stage + kWFull, policy);
  });
}

// Activations -> operands. A warp has one half of a stage, of every other eight tokens.
struct Converter {
  static constexpr int kUnits = kTokens / 16, kBatch = kUnits < 4 ? kUnits : 4;
  u32 from, scale_from, to, to_other;  // in a stage

  DEVICE explicit Converter(int warp) {
    const int lane = lane_id(), c = lane & 3, half = warp & 1, eight = (warp >> 1 & 1) * 8;
    const int row = spread(lane >> 2), to_row = spread(lane & 7);
    from = kXCodes + (eight + row) * kColumns + ((4 * half + c ^ row) << 4);
    scale_from = kXScales + ((2 * half + (c >> 1)) * 16 + eight + row) * kUnits;
    // where this lane's row of stmatrix begins: a quarter of the lanes each has one matrix
    to = half * kTokens * 128 + (eight + to_row) * 128 + ((lane >> 3 ^ to_row) << 4);
    to_other = to ^ 64;
    keep(from), keep(scale_from), keep(to), keep(to_other);
  }

  template <bool F16>
  DEVICE void convert_unit(u32 to_unit, const u32 (&codes)[4], u32 scale) const {
    u32 first[4], second[4];
#pragma unroll
    for (int s = 0; s < 4; s++)
      if constexpr (F16) to_f16(codes[s], scale, first[s], second[s]);
      else widen_any(codes[s], scale, first[s], second[s]);
    store_matrix4(to_unit + to, first[0], second[0], first[1], second[1]);
    store_matrix4(to_unit + to_other, first[2], second[2], first[3], second[3]);
  }
  template <bool F16> DEVICE void convert(u32 stage) const {
    u32 scales[2];
    load_bytes<kUnits>(stage + scale_from, scales);
#pragma unroll
    for (int unit = 0; unit < kUnits; unit += kBatch) {
      u32 codes[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        load_shared4(stage + from + (unit + i) * 16 * kColumns, codes[i]);
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const u32 n = (unit + i) % 4, word = scales[(unit + i) / 4];
        const u32 scale = F16 ? __byte_perm(word, 0, 0x0404 + 0x1010 * n) : byte_of(word, n);
        convert_unit<F16>(stage + (unit + i) * 16 * 128, codes[i], scale);
      }
    }
  }
};

// All columns, to f16 or to bf16. Where there are two, convert warpgroups take stages in turn: half
// the handshakes. Returns this warpgroup's next word. The operand's place is waited for first: then
// the stage's last use, which was the other warpgroup's, is over, and XFull's parity can only mean
// this one.
template <bool F16>
DEVICE int convert(const Converter& converter, int word, bool first_lane, const Part& t,
                   XPlace& x) {
#pragma unroll 1
  for (; word < t.last; word += kConvertGroups) {
    mbar_wait(x.at + kOperandFree, x.parity ^ 1);
    mbar_wait(x.at + kXFull, x.parity);
    converter.convert<F16>(x.at);
    fence_async_proxy();
    __syncwarp();
    if (first_lane) mbar_arrive(x.at + kOperandFull);
#pragma unroll
    for (int i = 0; i < kConvertGroups; i++) x.advance();
  }
  return word;
}
DEVICE void convert_role(u32 smem, int warp, const Part& t) {
  const Converter converter(warp);
  const bool first_lane = lane_id() == 0;
  XPlace x(smem);
  if (warp / 4) x.advance();
  meet();
  const int word = convert<true>(converter, t.first + warp / 4, first_lane, t, x);
  if (again(smem)) convert<false>(converter, word - (t.last - t.first), first_lane, t, x);
}
