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

// Has a ring's codes copied, a stage as each comes free; again, if the roles go over the columns
// again. `ask(word, stage)` starts a stage's copies, in one thread. The first stage is asked for before
// the CTA meets, the others that the ring has room for `Pace` cycles apart, so that no CTA's first
// stage is behind all of them.
template <int Stages, int Pace, u32 Free, class Ring, class Ask>
DEVICE void fill(const Part& t, u32 smem, Ask ask) {
  const u32 start = (u32)clock();
  Ring place(smem);
  const auto feed = [&](int word, int end) {
#pragma unroll 1
    for (; word < end; word++, place.advance()) {
      const int i = word - t.first;
      if (Pace > 0 && i < Stages)
        while ((u32)clock() - start < (u32)(i * Pace)) {}
      mbar_wait(place.at + Free, place.parity ^ 1);
      if (elected()) ask(word, place.at);
      __syncwarp();
    }
  };
  const int ahead = min(t.first + 1, t.last);
  feed(t.first, ahead);
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

// One warp for activations' codes. Tokens past the last become zeros, unread.
DEVICE void load_activations(const Params& p, u32 smem, const Part& t) {
  if (lane_id() == 0) {
    for (u32 at = smem; at < smem + kXStages * kXBytes; at += kXBytes) {
      mbar_init(at + kXFull, kFullArrivals);
      mbar_init(at + kXFree, 4 * kConvertGroups);
    }
    fence_barriers();
  }
  __syncwarp();
  fill<kXStages, 0, kXFree, XPlace>(t, smem, [&](int word, u32 stage) {
    mbar_arrive_expect(stage + kXFull, kTokens * kColumns);
    tensor_copy(stage + kXCodes, &p.x_map, word * kColumns, t.group, t.token, stage + kXFull);
  });
}

// One warp for the weight's codes, which every tile of tokens reads.
DEVICE void load_weight(const Params& p, u32 smem, const Part& t) {
  const u64 policy = once_policy();
  if (lane_id() == 0) {
    for (u32 at = smem + kSmemW; at < smem + kSmemW + kWStages * kWBytes; at += kWBytes) {
      mbar_init(at + kWFull, kFullArrivals);
      mbar_init(at + kWFree, 4 * kRowGroups);
    }
    fence_barriers();
  }
  __syncwarp();
  fill<kWStages, kPace, kWFree, WPlace>(t, smem, [&](int word, u32 stage) {
    mbar_arrive_expect(stage + kWFull, kRows * kColumns);
#pragma unroll
    for (int row = 0; row < kRows; row += kBoxRows)
      tensor_copy_once(stage + row * kColumns, &p.w_map, word * kColumns, t.row + row, t.group,
                       stage + kWFull, policy);
  });
}

// One warp for each side's scales: it copies them, a word of each row for a stage, and when they have
// come, kLag stages later, makes the upper bytes of f16 factors of them. It is the one who looks for
// scales that f16 has no room for. Second time, in bf16, scales stay as they are.
template <int Rows, u32 At, u32 Full, u32 Free, class Ring, int kLag> struct ScaleWarp {
  static constexpr int kEach = (Rows + kLanes - 1) / kLanes;  // rows of a lane, a warp apart
  u32 smem;
  int lane, live;              // rows there are from this lane's first on
  const u8* codes;             // of that row
  i64 codes_row, scale_word;
  const u32* scale[kEach];     // of a row, the word that is copied next

  DEVICE ScaleWarp(u32 smem_, int live_rows, const u8* codes_, i64 codes_row_, const u32* scale_,
                   i64 scale_row, i64 scale_word_)
      : smem(smem_), lane(lane_id()), live(min(live_rows, Rows) - lane),
        codes(codes_ + lane * codes_row_), codes_row(codes_row_), scale_word(scale_word_) {
#pragma unroll
    for (int e = 0; e < kEach; e++) scale[e] = scale_ + (lane + e * kLanes) * scale_row;
  }

  DEVICE bool is_live(int e) const { return e * kLanes < live; }
  DEVICE u32 place_of(u32 stage, int e) const { return stage + At + (lane + e * kLanes) * 4; }
  DEVICE void copy(u32 stage) {
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      if (is_live(e)) copy4(place_of(stage, e), scale[e]);
      scale[e] += scale_word;
    }
  }
  // A scale out of range, of codes that are all zeros, may as well be another.
  DEVICE u32 fit(u32 scales, const u8* block) const {
#pragma unroll 1
    for (int i = 0; i < 4; i++, block += 32) {
      if (!is_far(byte_of(scales, i))) continue;
      u32 first[4], second[4];
      load_global4(block, first), load_global4(block + 16, second);
      if (any_value(first) || any_value(second)) ask_again(smem);
      scales = scales & ~(0xffu << 8 * i) | kFirst << 8 * i;
    }
    return scales;
  }
  DEVICE void make_factors(u32 stage, int word) const {
    u32 scales[kEach], far = 0;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      scales[e] = is_live(e) ? load_shared(place_of(stage, e)) : kFirst * 0x01010101u;
      far |= far_bits(scales[e]);
    }
    if (__any_sync(~0u, far)) {
#pragma unroll
      for (int e = 0; e < kEach; e++)
        if (is_live(e)) scales[e] = fit(scales[e], codes + e * kLanes * codes_row + word * kColumns);
    }
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (Rows >= kLanes || lane < Rows) store_shared(place_of(stage, e), f16_factors(scales[e]));
  }
  // Columns of the words from `word` on; `made`: the stage that comes first among those copied.
  template <bool F16> DEVICE void feed(const Part& t, Ring& place, Ring& made, int word) {
#pragma unroll 1
    for (; word < t.last + kLag; word++) {
      if (word < t.last) {
        mbar_wait(place.at + Free, place.parity ^ 1);
        copy(place.at);
        place.advance();
      }
      copy_commit();
      if (word < t.first + kLag) continue;
      copy_wait<kLag>();
      if (F16) make_factors(made.at, word - kLag);
      mbar_arrive(made.at + Full);
      made.advance();
    }
  }
  DEVICE void run(const Part& t) {
    Ring place(smem), made(smem);
    if (t.first < t.last) {
      copy(place.at);
      place.advance();
    }
    copy_commit();
    meet();
    feed<true>(t, place, made, t.first + 1);
    if (again(smem)) {
#pragma unroll
      for (int e = 0; e < kEach; e++) scale[e] -= (t.last - t.first) * scale_word;
      feed<false>(t, place, made, t.first);
    }
  }
};
DEVICE void scale_activations(const Params& p, u32 smem, const Part& t) {
  const Operands& o = p.o;
  ScaleWarp<kTokens, kXScales, kXFull, kXFree, XPlace, 1>(
      smem, o.tokens - t.token, o.x + t.group * o.x_group + t.token * o.x_token, o.x_token,
      o.x_scale + t.group * o.x_scale_group + t.token * o.x_scale_token + t.first * o.x_scale_word,
      o.x_scale_token, o.x_scale_word)
      .run(t);
}
DEVICE void scale_weight(const Params& p, u32 smem, const Part& t) {
  const Operands& o = p.o;
  ScaleWarp<kRows, kWScales, kWFull, kWFree, WPlace, 2>(
      smem, kRows, o.w + t.group * o.w_group + t.row * o.w_row, o.w_row,
      o.w_scale + t.group * o.w_scale_group + t.row * o.w_scale_row + t.first * o.w_scale_word,
      o.w_scale_row, o.w_scale_word)
      .run(t);
}

// Activations -> operands. A warp has one half of each stage, of every kStep-th eight tokens.
struct Converter {
  static constexpr int kStep = 2 * kConvertGroups, kUnits = kTokens / 8 / kStep;
  u32 from, scale_from, to, to_other;  // in a stage

  DEVICE explicit Converter(int warp) {
    const int lane = lane_id(), c = lane & 3, half = warp & 1, eight = (warp >> 1) * 8;
    const int row = spread(lane >> 2), to_row = spread(lane & 7);
    from = kXCodes + (eight + row) * kColumns + ((4 * half + c ^ row) << 4);
    scale_from = kXScales + (eight + row) * 4 + 2 * half + (c >> 1);
    // where this lane's row of stmatrix begins: a quarter of the lanes each has one matrix
    to = half * kTokens * 128 + (eight + to_row) * 128 + ((lane >> 3 ^ to_row) << 4);
    to_other = to ^ 64;
    keep(from), keep(scale_from), keep(to), keep(to_other);
  }

  using Codes = u32[kUnits][4];
  using Scales = u32[kUnits];
  DEVICE void load(u32 stage, Codes& codes, Scales& scales) const {
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      load_shared4(stage + from + i * kStep * 8 * kColumns, codes[i]);
      scales[i] = load_shared_byte(stage + scale_from + i * kStep * 32);
    }
  }
  template <bool F16> DEVICE void store(u32 stage, const Codes& codes, const Scales& scales) const {
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      u32 first[4], second[4];
#pragma unroll
      for (int s = 0; s < 4; s++)
        if constexpr (F16) to_f16(codes[i][s], scales[i] * kUpperBytes, first[s], second[s]);
        else widen_any(codes[i][s], scales[i], first[s], second[s]);
      const u32 unit = stage + i * kStep * 8 * 128;
      store_matrix4(unit + to, first[0], second[0], first[1], second[1]);
      store_matrix4(unit + to_other, first[2], second[2], first[3], second[3]);
    }
  }
};

// All columns, to f16 or to bf16.
template <bool F16>
DEVICE void convert(const Converter& converter, bool first_lane, const Part& t, XPlace& x) {
  Converter::Codes codes;
  Converter::Scales scales;
#pragma unroll 1
  for (int word = t.first; word < t.last; word++, x.advance()) {
    mbar_wait(x.at + kXFull, x.parity);
    converter.load(x.at, codes, scales);
    mbar_wait(x.at + kOperandFree, x.parity ^ 1);
    converter.store<F16>(x.at, codes, scales);
    fence_async_proxy();
    __syncwarp();
    if (first_lane) {
      mbar_arrive(x.at + kOperandFull);
      mbar_arrive(x.at + kXFree);
    }
  }
}
DEVICE void convert_role(u32 smem, int warp, const Part& t) {
  const Converter converter(warp);
  const bool first_lane = lane_id() == 0;
  XPlace x(smem);
  meet();
  convert<true>(converter, first_lane, t, x);
  if (again(smem)) convert<false>(converter, first_lane, t, x);
}
