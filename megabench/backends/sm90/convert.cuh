// The converter warpgroup: quantized records -> bf16 tiles.
//
// Each warp owns 16 rows of every block and stages them, two rows (a unit) at a time, through a
// private ring of kUnits units filled by cp.async, which needs no registers and no barrier.
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
  u32 ring, unit;          // this warp's staging ring; offset of the oldest unit in it
  u32 tile;                // where the lane stores the first 16 dims of unit 0, tile 0

  DEVICE Converter(const Params& params, u32 smem_base, Lane me)
      : p(params), smem(smem_base), warp(me.warp), lane(me.lane), g(me.lane >> 3),
        r((me.lane >> 2) & 1), c(me.lane & 3), unit(0) {
    ring = smem + kSmemRaw + warp * kUnits * kUnitBytes;
    tile = smem + kSmemKV + g * kTileGroup + (16 * warp + r) * 128 + (((2 * c) ^ r) << 4);
  }

  DEVICE u32 meta(u32 block) const { return load_shared(smem + kSmemMeta + (block % kSlots) * 4); }

  // Starts the copy of unit `u` of `block` into the staging slot `at`. Masked rows become zeros.
  DEVICE void issue(u32 at, u32 block, int u, bool extra) {
    const u32 dst = ring + at;
    const u8* pool = p.pool[extra];
    u32 o0, o1;
    load_shared2(smem + kSmemOffsets + ((block % kSlots) * kBlock + 16 * warp + 2 * u) * 4, o0, o1);
    const u32 n0 = o0 == kNoRow ? 0 : 16, n1 = o1 == kNoRow ? 0 : 16;
    const u8* row0 = n0 ? pool + (u64)o0 * 16 : pool;
    const u8* row1 = n1 ? pool + (u64)o1 * 16 : pool;
    if (!(extra && p.extra_fp4)) {
      copy16(dst + lane * 16, row0 + lane * 16, n0);
      copy16(dst + kRowPitch + lane * 16, row1 + lane * 16, n1);
      if (lane < 2)
        copy16(dst + lane * kRowPitch + kFp8Data, (lane ? row1 : row0) + kFp8Data, lane ? n1 : n0);
    } else {
      const bool second = lane >> 4;
      copy16(dst + second * kRowPitch + (lane & 15) * 16, (second ? row1 : row0) + (lane & 15) * 16,
             second ? n1 : n0);
      if (lane < 4) {
        const bool scales_second = lane >> 1;
        const u32 inside = kFp4Data + (lane & 1) * 16;
        copy16(dst + scales_second * kRowPitch + inside, (scales_second ? row1 : row0) + inside,
               scales_second ? n1 : n0);
      }
    }
    copy_commit();
  }

  // Waits for the oldest staged unit and reads this lane's part of it.
  DEVICE void take(RawUnit& raw, bool fp4) {
    copy_wait<kUnits - 1>();
    __syncwarp();
    const u32 row = ring + unit + r * kRowPitch;
    if (!fp4) {
      load_shared4(row + 64 * g + 16 * c, raw.lo);
      load_shared4(row + 64 * g + 16 * c + 256, raw.hi);
      raw.scale_lo = load_shared_byte(row + kFp8Data + 2 * g + (c >> 1));
      raw.scale_hi = load_shared_byte(row + kFp8Data + 2 * g + (c >> 1) + 8);
    } else {
      load_shared2(row + 32 * g + 8 * c, raw.lo[0], raw.lo[1]);
      load_shared2(row + 32 * g + 8 * c + 128, raw.hi[0], raw.hi[1]);
      raw.scale_lo = load_shared_byte(row + kFp4Data + 4 * g + c);
      raw.scale_hi = load_shared_byte(row + kFp4Data + 4 * g + c + 16);
    }
    __syncwarp();  // every lane has read the slot before it is refilled
  }

  DEVICE u32 advance() {  // the slot that `take` emptied
    const u32 emptied = unit;
    unit = unit == (kUnits - 1) * kUnitBytes ? 0 : unit + kUnitBytes;
    return emptied;
  }

  // 16 dims: 8 columns of even pairs, 8 of odd pairs.
  DEVICE static void store16(u32 at, const u32* even, const u32* odd) {
    store_shared4(at, even);
    store_shared4(at ^ 16, odd);
  }

  // Scale bytes above 134 (rows beyond 2^15) need their factor in two steps to stay in bf16.
  template <bool Large> DEVICE static void convert16(const u32* codes, u32 scale, u32 at) {
    u32 even[4], odd[4];
    const u32 factor = ((Large ? min(scale, 134u) : scale) + 120) * 0x00800080u;
#pragma unroll
    for (int i = 0; i < 4; i++) convert_e4m3(codes[i], factor, even[i], odd[i]);
    if (Large) {
      const u32 rest = (max(scale, 134u) - 134 + 127) * 0x00800080u;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        even[i] = mul_bf16x2(even[i], rest);
        odd[i] = mul_bf16x2(odd[i], rest);
      }
    }
    store16(at, even, odd);
  }

  DEVICE static void convert16_fp4(const u32* codes, float scale, u32 at) {
    u32 even[4], odd[4];
    const float f = scale * 0x1p117f;  // 126 for the code's place, less kFp4Shift
    const u32 factor = pack_bf16(f, f);
#pragma unroll
    for (int i = 0; i < 4; i++)
      convert_e2m1(__byte_perm(codes[i >> 1], 0, i & 1 ? 0x3322 : 0x1100), factor, even[i], odd[i]);
    store16(at, even, odd);
  }

  DEVICE void convert(const RawUnit& raw, u32 tile_base, int u, bool fp4) {
    const u32 at = (tile_base ^ (((2 * u) & 7) << 4)) + u * 256;
    constexpr u32 kFar = 4 * kTileGroup;  // 256 dims further on
    if (fp4) {
      float lo, hi;
      unpack_e4m3x2(raw.scale_lo | raw.scale_hi << 8, lo, hi);
      convert16_fp4(raw.lo, lo, at);
      convert16_fp4(raw.hi, hi, at + kFar);
    } else if (__any_sync(~0u, max(raw.scale_lo, raw.scale_hi) > 134)) {
      convert16<true>(raw.lo, raw.scale_lo, at);
      convert16<true>(raw.hi, raw.scale_hi, at + kFar);
    } else {
      convert16<false>(raw.lo, raw.scale_lo, at);
      convert16<false>(raw.hi, raw.scale_hi, at + kFar);
    }
  }
};

DEVICE void convert_role(const Params& p, u32 smem, Lane me, int first_item, int item_step) {
  Converter cv(p, smem, me);
  bar_sync(kBarStart, 2 * kRoleThreads);  // offsets of the first blocks are there
  u32 block = 0, meta = cv.meta(0);
#pragma unroll
  for (int u = 0; u < kUnits; u++) cv.issue(u * kUnitBytes, 0, u, meta & kMetaExtra);
#pragma unroll 1
  for (int item = first_item; item < p.items;) {
    const bool extra = meta & kMetaExtra, fp4 = extra && p.extra_fp4;
    const u32 next_meta = cv.meta(block + 1), x = block & 1;
    const bool next_extra = next_meta & kMetaExtra;
    RawUnit raw[2];
    auto take = [&](int u) {
      cv.take(raw[u & 1], fp4);
      const int refill = u + kUnits;
      if (refill < kUnitsPerBlock) cv.issue(cv.advance(), block, refill, extra);
      else cv.issue(cv.advance(), block + 1, refill - kUnitsPerBlock, next_extra);
    };
    take(0);
    mbar_wait(smem + kBarTileFree + 8 * x, ((block >> 1) & 1) ^ 1);
#pragma unroll
    for (int u = 0; u < kUnitsPerBlock; u++) {
      if (u + 1 < kUnitsPerBlock) take(u + 1);
      cv.convert(raw[u & 1], cv.tile + x * kTileBytes, u, fp4);
    }
    fence_async_proxy();
    __syncwarp();
    if (me.lane == 0) mbar_arrive(smem + kBarTileFull + 8 * x);
    if (meta & kMetaLast) item += item_step;
    meta = next_meta;
    block++;
  }
  copy_wait<0>();
}
