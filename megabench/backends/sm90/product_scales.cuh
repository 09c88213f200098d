// Scales of the product: copied a word a row, and made the upper bytes of f16 factors.
#pragma once

#include "product.cuh"

// A side's rows that a lane has, kApart of each other, and where their factors go.
struct ActivationScales {
  static constexpr int kThere = kTokens, kEach = (kTokens + kLanes - 1) / kLanes, kApart = 16;
  static constexpr u32 kAt = kXScales, kCopied = kXCopied, kFull = kXFull;
  using Place = XPlace;
  static DEVICE int first_row(int lane) { return (lane >> 4) * kApart * kEach + (lane & 15); }
  // [4][16][tokens / 16] bytes: a lane's tokens are neighbours
  static DEVICE void store(u32 stage, int lane, const u32 (&factors)[kEach]) {
    if (first_row(lane) >= kTokens) return;
    const u32 at = stage + kAt + (lane & 15) * (kTokens / 16) + (lane >> 4) * kEach;
#pragma unroll
    for (int block = 0; block < 4; block++) {
      u32 bytes = byte_of(factors[0], block);
#pragma unroll
      for (int e = 1; e < kEach; e++)
        bytes = __byte_perm(bytes, factors[e], 0x3210 + ((4 + block - e) << 4 * e));
      store_bytes<kEach>(at + block * kTokens, bytes);
    }
  }
};
struct WeightScales {
  static constexpr int kThere = kRows, kEach = kRows / kLanes, kApart = kLanes;
  static constexpr u32 kAt = kWScales, kCopied = kWCopied, kFull = kWFull;
  using Place = WPlace;
  static DEVICE int first_row(int lane) { return lane; }
  static DEVICE void store(u32 stage, int lane, const u32 (&factors)[kEach]) {
#pragma unroll
    for (int e = 0; e < kEach; e++) store_shared(stage + kAt + (lane + e * kLanes) * 4, factors[e]);
  }
};
// Until then they are where they were copied to, in the lanes' order.
template <class Side> DEVICE u32 copied_at(u32 stage, int lane, int e) {
  return stage + Side::kAt + (lane + e * kLanes) * 4;
}

// The copies, in one warp.
template <class Side> struct ScaleCopies {
  int lane, live;                    // rows there are from this lane's first on
  i64 scale_word;
  const u32* scale[Side::kEach];     // of a row, the word that is copied next

  DEVICE ScaleCopies(int live_rows, const u32* first, i64 scale_row, i64 scale_word_)
      : lane(lane_id()), live(min(live_rows, Side::kThere) - Side::first_row(lane)),
        scale_word(scale_word_) {
#pragma unroll
    for (int e = 0; e < Side::kEach; e++)
      scale[e] = first + (Side::first_row(lane) + e * Side::kApart) * scale_row;
  }
  DEVICE void copy(u32 stage) {
#pragma unroll
    for (int e = 0; e < Side::kEach; e++) {
      if (e * Side::kApart < live) copy4(copied_at<Side>(stage, lane, e), scale[e]);
      scale[e] += scale_word;
    }
    arrive_after_copies(stage + Side::kCopied);
  }
  DEVICE void back(int words) {
#pragma unroll
    for (int e = 0; e < Side::kEach; e++) scale[e] -= words * scale_word;
  }
};

// A scale out of range, of codes that are all zeros, may as well be another. A function of its own:
// in the loop that needs it, it would be fetched whether needed or not.
static __device__ __noinline__ u32 fit(u32 smem, u32 scales, const u8* block) {
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

// Copied scales -> factors, by one warp for each side, which is the one who looks for scales that
// f16 has no room for. Second time, in bf16, scales stay as they are.
template <class Side> struct ScaleWarp {
  u32 smem;
  int lane, live;              // rows there are from this lane's first on
  const u8* codes;             // of that row
  i64 codes_row;

  DEVICE ScaleWarp(u32 smem_, int live_rows, const u8* codes_, i64 codes_row_)
      : smem(smem_), lane(lane_id()),
        live(min(live_rows, Side::kThere) - Side::first_row(lane)),
        codes(codes_ + Side::first_row(lane) * codes_row_), codes_row(codes_row_) {}

  DEVICE void make_factors(u32 (&scales)[Side::kEach], int word) const {
    u32 far = 0;
#pragma unroll
    for (int e = 0; e < Side::kEach; e++) far |= far_bits(scales[e]);
    if (__any_sync(~0u, far)) {
#pragma unroll
      for (int e = 0; e < Side::kEach; e++)
        if (e * Side::kApart < live)
          scales[e] =
              fit(smem, scales[e], codes + e * Side::kApart * codes_row + word * kColumns);
    }
#pragma unroll
    for (int e = 0; e < Side::kEach; e++) scales[e] = f16_factors(scales[e]);
  }
  template <bool F16> DEVICE void feed(const Part& t, typename Side::Place& place) {
#pragma unroll 1
    for (int word = t.first; word < t.last; word++, place.advance()) {
      u32 scales[Side::kEach];
      mbar_wait(place.at + Side::kCopied, place.parity);
#pragma unroll
      for (int e = 0; e < Side::kEach; e++)
        scales[e] = e * Side::kApart < live ? load_shared(copied_at<Side>(place.at, lane, e))
                                            : kFirst * 0x01010101u;
      if (F16) make_factors(scales, word);
      __syncwarp();  // all lanes have read
      Side::store(place.at, lane, scales);
      __syncwarp();
      if (lane == 0) mbar_arrive(place.at + Side::kFull);
    }
  }
  DEVICE void run(const Part& t) {
    typename Side::Place place(smem);
    meet();
    feed<true>(t, place);
    if (again(smem)) feed<false>(t, place);
  }
};
DEVICE void scale_activations(const Params& p, u32 smem, const Part& t) {
  const Operands& o = p.o;
  ScaleWarp<ActivationScales>(smem, o.tokens - t.token,
                              o.x + t.group * o.x_group + t.token * o.x_token, o.x_token)
      .run(t);
}
DEVICE void scale_weight(const Params& p, u32 smem, const Part& t) {
  const Operands& o = p.o;
  ScaleWarp<WeightScales>(smem, kRows, o.w + t.group * o.w_group + t.row * o.w_row, o.w_row)
      .run(t);
}
