// The converter warpgroup: quantized records -> bf16 tiles.
//
// Each warp owns 16 rows of every block, four of each step of P V, and stages them, two rows (a
// unit) at a time, through a private ring of kUnits units filled by cp.async, which needs no
// registers and no barrier beyond the warp. A masked row is staged as zeros.
// Lane 8*g + 4*r + c holds dims 64*g + 16*c .. +15 of row 2*unit + r, and the same dims + 256.
//
// Column order: a conversion step yields the code pairs (0, 2) and (1, 3) of four neighbours. They
// are stored as they come: inside 16 dims, tile column 8h + 2s + e holds dim 4s + h + 2e. Q is
// permuted likewise, and the output warps read four neighbouring dims from their fragments.
#pragma once

#include "layout.cuh"

// Four e4m3 codes -> two bf16 pairs. An e4m3 code moved into bf16's fields is worth code * 2^-120.
DEVICE void convert_e4m3(u32 codes, u32 factor, u32& even, u32& odd) {
  const u32 e = ((codes << 8) & 0x80008000u) | ((codes << 4) & 0x07f007f0u);
  const u32 o = (codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u);
  even = mul_bf16x2(e, factor);
  odd = mul_bf16x2(o, factor);
}

// Two bytes of e2m1 pairs, each twice in its half of `bytes` -> (dims 0, 2) and (dims 1, 3). An
// e2m1 code moved into bf16's fields is worth code * 2^-126.
DEVICE void convert_e2m1(u32 bytes, u32 factor, u32& even, u32& odd) {
  const u32 e = ((bytes << 4) & 0x80008000u) | ((bytes << 6) & 0x01c001c0u);
  const u32 o = (bytes & 0x80008000u) | ((bytes << 2) & 0x01c001c0u);
  even = mul_bf16x2(e, factor);
  odd = mul_bf16x2(o, factor);
}

struct RawUnit {
  u32 lo[4], hi[4];        // codes of the lane's 16 dims, and of the 16 that are 256 further on
  u32 scale_lo, scale_hi;
};

struct Converter {
  const Params& p;
  u32 smem;
  int warp, lane, g, r, c;
  u32 ring, scales;        // this warp's staging memory
  u32 tile;                // where the lane stores the first 16 dims of unit 0, tile 0
  // the next unit to stage
  u32 offset0, offset1;    // its rows
  const u8* lane_base;     // what their offsets are added to
  u32 lane_slot;           // where the lane's 16 bytes go in slot 0
  bool stage_fp4, second_row;

  DEVICE Converter(const Params& params, u32 smem_base, int warp_, int lane_)
      : p(params), smem(smem_base), warp(warp_), lane(lane_), g(lane >> 3), r((lane >> 2) & 1),
        c(lane & 3), ring(smem + kSmemRaw + warp * kUnits * kUnitBytes),
        scales(smem + kSmemScales + warp * 2 * kScaleBytes),
        tile(smem + kSmemKV + g * kTileGroup + (4 * warp + r) * 128 +
             (((2 * c) ^ r ^ (4 * (warp & 1))) << 4)) {}

  // Where the offsets of this warp's unit 0 are; unit u's are unit_rows(u) bytes further on.
  DEVICE u32 rows_of(u32 block) const {
    return smem + kSmemOffsets + (block % kSlots * kBlock + 4 * warp) * 4;
  }
  DEVICE static constexpr u32 unit_rows(int u) { return u / 2 * (kStep * 4) + u % 2 * 8; }
  DEVICE u32 meta_of(u32 block) const { return load_shared(smem + kSmemMeta + block % kSlots * 4); }

  DEVICE void read_offsets(u32 at) { load_shared2(at, offset0, offset1); }

  // Turns staging to `block` and starts its scales: 16 bytes a row (lanes 0-15) or 32 (two lanes).
  DEVICE void stage_block(u32 block) {
    const u32 extra = meta_of(block) & kMetaExtra, to = scales + (block & 1) * kScaleBytes;
    const u8* pool = pick(p.pool, extra);
    stage_fp4 = kExtraFp4 && extra;
    second_row = stage_fp4 && lane >= 16;
    const int in_row = stage_fp4 ? lane % 16 : lane;
    lane_base = pool + in_row * 16;
    lane_slot = ring + in_row * 16 + (second_row ? kRowPitch : 0);
    const int row = stage_fp4 ? lane / 2 : lane % 16, part = stage_fp4 ? lane % 2 * 16 : 0;
    const u32 offset = load_shared(rows_of(block) + unit_rows(row / 2) + row % 2 * 4);
    if (stage_fp4 || lane < 16)
      copy16(to + row * kScalePitch + part,
             pool + (u64)offset * 16 + (stage_fp4 ? kFp4Data : kFp8Data) + part,
             offset == kNoRow ? 0 : 16);
  }

  // Starts the copy of the next unit into a slot: NVFP4's two rows at once, fp8's one by one. A
  // masked row reads nothing and becomes zeros.
  DEVICE void stage_unit(int slot) {
    const u32 to = lane_slot + slot * kUnitBytes, offset = second_row ? offset1 : offset0;
    copy16(to, lane_base + (u64)offset * 16, offset == kNoRow ? 0 : 16);
    if (!stage_fp4)
      copy16(to + kRowPitch, lane_base + (u64)offset1 * 16, offset1 == kNoRow ? 0 : 16);
    copy_commit();
  }

  // Reads the oldest staged unit and stages another in its slot; then reads the offsets at `next`.
  template <bool Fp4> DEVICE void take(RawUnit& raw, u32 scale, int slot, u32 next) {
    copy_wait<kUnits - 1>();
    __syncwarp();
    const u32 row = ring + slot * kUnitBytes + r * kRowPitch;
    if (!Fp4) {
      load_shared4(row + 64 * g + 16 * c, raw.lo);
      load_shared4(row + 64 * g + 16 * c + 256, raw.hi);
      raw.scale_lo = load_shared_byte(scale + 2 * g + (c >> 1));
      raw.scale_hi = load_shared_byte(scale + 2 * g + (c >> 1) + 8);
    } else {
      load_shared2(row + 32 * g + 8 * c, raw.lo[0], raw.lo[1]);
      load_shared2(row + 32 * g + 8 * c + 128, raw.hi[0], raw.hi[1]);
      raw.scale_lo = load_shared_byte(scale + 4 * g + c);
      raw.scale_hi = load_shared_byte(scale + 4 * g + c + 16);
    }
    __syncwarp();  // every lane has read the slot before it is refilled
    stage_unit(slot);
    read_offsets(next);
  }

  // 16 dims: 8 columns of even pairs, 8 of odd pairs. `at`: of both, `further` bytes on.
  DEVICE static void store16(const u32 (&at)[2], u32 further, const u32* even, const u32* odd) {
    store_shared4(at[0] + further, even);
    store_shared4(at[1] + further, odd);
  }

  DEVICE static void convert16(const u32* codes, u32 scale, const u32 (&at)[2], u32 further) {
    u32 even[4], odd[4];
    const u32 factor = ((kShortCode ? min(scale, 134u) : scale) + 120) * 0x00800080u;
#pragma unroll
    for (int i = 0; i < 4; i++) convert_e4m3(codes[i], factor, even[i], odd[i]);
    store16(at, further, even, odd);
  }

  // Scale bytes above 134 (rows beyond 2^15) need their factor in two steps to stay in bf16.
  DEVICE static void convert16_large(const u32* codes, u32 scale, const u32 (&at)[2],
                                     u32 further) {
    const u32 factor = (min(scale, 134u) + 120) * 0x00800080u;
    const u32 rest = (max(scale, 134u) - 134 + 127) * 0x00800080u;
    u32 even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      convert_e4m3(codes[i], factor, even[i], odd[i]);
      even[i] = mul_bf16x2(even[i], rest);
      odd[i] = mul_bf16x2(odd[i], rest);
    }
    store16(at, further, even, odd);
  }

  // The same with less code: the second step, of what this lane has stored of the first.
  DEVICE static void multiply_stored(u32 scale, const u32 (&at)[2], u32 further) {
    const u32 rest = (max(scale, 134u) - 134 + 127) * 0x00800080u;
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      u32 pairs[4];
      load_shared4((i ? at[1] : at[0]) + further, pairs);
#pragma unroll
      for (int n = 0; n < 4; n++) pairs[n] = mul_bf16x2(pairs[n], rest);
      store_shared4((i ? at[1] : at[0]) + further, pairs);
    }
  }

  DEVICE static void convert16_fp4(const u32* codes, float scale, const u32 (&at)[2],
                                   u32 further) {
    u32 even[4], odd[4];
    const float f = scale * 0x1p117f;  // 126 for the code's place, less kFp4Shift
    const u32 factor = pack_bf16(f, f);
#pragma unroll
    for (int i = 0; i < 4; i++)
      convert_e2m1(__byte_perm(codes[i >> 1], 0, i & 1 ? 0x3322 : 0x1100), factor, even[i], odd[i]);
    store16(at, further, even, odd);
  }

  template <bool Fp4>
  DEVICE static void convert(const RawUnit& raw, const u32 (&at)[2], u32 further) {
    const u32 far = further + 4 * kTileGroup;  // 256 dims further on
    if (Fp4) {
      float lo, hi;
      unpack_e4m3x2(raw.scale_lo | raw.scale_hi << 8, lo, hi);
      convert16_fp4(raw.lo, lo, at, further);
      convert16_fp4(raw.hi, hi, at, far);
    } else {
      convert16(raw.lo, raw.scale_lo, at, further);
      convert16(raw.hi, raw.scale_hi, at, far);
      if (__any_sync(~0u, max(raw.scale_lo, raw.scale_hi) > 134)) {
        if (kShortCode) {
          multiply_stored(raw.scale_lo, at, further);
          multiply_stored(raw.scale_hi, at, far);
        } else {  // once more, the slow way
          convert16_large(raw.lo, raw.scale_lo, at, further);
          convert16_large(raw.hi, raw.scale_hi, at, far);
        }
      }
    }
  }

  DEVICE void wait_free(u32 block, int step) const {
    mbar_wait(smem + kBarTileFree + ((block & 1) * kSteps + step) * 8, ((block >> 1) & 1) ^ 1);
  }

  // One block. Units are read one ahead of their conversion and staged kUnits ahead, so that the
  // second half stages the next block's first units. Two units fill a warp's part of a step.
  template <bool Fp4> DEVICE void convert_block(u32 block) {
    const u32 x = block & 1;
    u32 ahead = rows_of(block) + unit_rows(5);  // the offsets to read next
    u32 scale = scales + x * kScaleBytes + r * kScalePitch;
    const u32 to = tile + x * kTileBytes;
    u32 even[2] = {to, to ^ 16}, odd[2] = {to ^ 32, to ^ 48};  // where even and odd units go
    RawUnit raw[2];
    take<Fp4>(raw[0], scale, 0, ahead);
    ahead += unit_rows(6) - unit_rows(5);
#pragma unroll 2
    for (int step = 0; step < kSteps; step++) {
      const int slot = step % 2 * 2;
      wait_free(block, step);
      if (step == 1) {
        // Later offsets are known to be there with a free tile: see Cursor and kLookahead.
        if (block == 0) bar_sync(kBarLookahead, 2 * kRoleThreads);
        ahead = rows_of(block + 1);
      }
      take<Fp4>(raw[1], scale + 2 * kScalePitch, slot + 1, ahead);
      convert<Fp4>(raw[0], even, 0);
      if (step == 1) stage_block(block + 1);
      if (step < kSteps - 1) take<Fp4>(raw[0], scale + 4 * kScalePitch, 2 - slot, ahead + 8);
      convert<Fp4>(raw[1], odd, 256);
      scale += 4 * kScalePitch, ahead += unit_rows(2);
#pragma unroll
      for (int i = 0; i < 2; i++) even[i] += kStep * 128, odd[i] += kStep * 128;
    }
    announce(block);
  }

  // The same, a unit at a time: less code, for the less frequent of two record types.
  template <bool Fp4> DEVICE void convert_block_by_units(u32 block) {
    const u32 rows = rows_of(block), next_rows = rows_of(block + 1);
    const u32 scale = scales + (block & 1) * kScaleBytes + r * kScalePitch;
    u32 to = tile + (block & 1) * kTileBytes;
    RawUnit raw;
    take<Fp4>(raw, scale, 0, rows + unit_rows(5));
#pragma unroll 1
    for (int u = 0; u < kUnitsPerBlock; u++) {
      RawUnit next = raw;
      if (u % 2 == 0) wait_free(block, u / 2);
      if (u < kUnitsPerBlock - 1)
        take<Fp4>(next, scale + (u + 1) * 2 * kScalePitch, (u + 1) % kUnits,
                  u < 2 ? rows + unit_rows(u + 6) : next_rows + unit_rows(u - 2));
      const u32 at = to ^ (u % 2 * 32);
      convert<Fp4>(raw, {at, at ^ 16}, u % 2 * 256);
      if (u == 2) stage_block(block + 1);
      to += u % 2 * (kStep * 128);
      raw = next;
    }
    announce(block);
  }

  // This warp's part of a block's tile is written.
  DEVICE void announce(u32 block) const {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbar_arrive(smem + kBarTileFull + 8 * (block & 1));
  }
};
static_assert(kUnits == 4 && kUnitsPerBlock == 8, "convert_block is written for these");

// Converts from `block` on, whose offsets are there.
DEVICE void convert_role(const Params& p, u32 smem, int warp, int first_item, int item_step,
                         u32 block) {
  Converter cv(p, smem, warp, lane_id());
  cv.stage_block(block);
#pragma unroll 1
  for (int u = 0; u < kUnits; u++) {
    cv.read_offsets(cv.rows_of(block) + cv.unit_rows(u));
    cv.stage_unit(u);
  }
  cv.read_offsets(cv.rows_of(block) + cv.unit_rows(kUnits));
#pragma unroll 1
  for (int item = first_item; item < p.items; block++) {
    const u32 meta = cv.meta_of(block);
    if (kExtraFp4 && (meta & kMetaExtra)) cv.convert_block<true>(block);
    else if (kClustered && kExtraFp4) cv.convert_block_by_units<false>(block);
    else cv.convert_block<false>(block);
    if (meta & kMetaLast) item += item_step;
  }
  copy_wait<0>();
}
