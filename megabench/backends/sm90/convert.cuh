// The converter warpgroup: quantized records -> bf16 tiles.
//
// Each warp owns 16 rows of every block and stages them, two rows (a unit) at a time, through a
// private ring of kUnits units filled by cp.async, which needs no registers and no barrier beyond
// the warp. A masked row is staged as zeros.
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

// Starts the copies of units, in order, across blocks.
struct Stager {
  const Params& p;
  u32 offsets, meta;       // shared addresses: this warp's rows in slot 0 of the ring, meta of slot 0
  u32 ring, scales;        // this warp's staging memory
  int lane;
  u32 next;                // unit to start, counted from the first block
  u32 offset0, offset1;    // its rows
  u32 kind;                // meta of its block
  const u8* lane_base;     // what its rows' offsets are added to

  DEVICE Stager(const Params& params, u32 smem, int warp, int lane_)
      : p(params), offsets(smem + kSmemOffsets + 64 * warp), meta(smem + kSmemMeta),
        ring(smem + kSmemRaw + warp * kUnits * kUnitBytes),
        scales(smem + kSmemScales + warp * 2 * kScaleBytes), lane(lane_), next(0) {
    look_ahead();
  }

  DEVICE bool fp4() const { return (kind & kMetaExtra) && p.extra_fp4; }

  DEVICE void look_ahead() {
    const u32 slot = (next / kUnitsPerBlock) % kSlots, unit = next % kUnitsPerBlock;
    load_shared2(offsets + slot * (kBlock * 4) + unit * 8, offset0, offset1);
    if (unit == 0) kind = load_shared(meta + slot * 4);
  }

  // The scales of a block: 16 bytes a row (lanes 0-15), or 32 (two lanes a row).
  DEVICE void begin_block() {
    const u8* pool = p.pool[kind & kMetaExtra];
    const u32 block = next / kUnitsPerBlock, to = scales + (block & 1) * kScaleBytes;
    const bool narrow = fp4();
    lane_base = pool + (narrow ? lane % 16 : lane) * 16;
    const int row = narrow ? lane / 2 : lane % 16, part = narrow ? lane % 2 : 0;
    const u32 offset = load_shared(offsets + (block % kSlots) * (kBlock * 4) + row * 4);
    if (narrow || lane < 16) {
      const u8* from = pool + (narrow ? kFp4Data : kFp8Data) + part * 16;
      copy16(to + row * kScalePitch + part * 16, from + (offset == kNoRow ? 0 : (u64)offset * 16),
             offset == kNoRow ? 0 : 16);
    }
  }

  DEVICE void copy_row(u32 to, u32 offset) {
    copy16(to, lane_base + (u64)offset * 16, offset == kNoRow ? 0 : 16);  // masked: zeros
  }

  DEVICE void start() {
    if (next % kUnitsPerBlock == 0) begin_block();
    const u32 to = ring + (next % kUnits) * kUnitBytes;
    if (!fp4()) {
      copy_row(to + lane * 16, offset0);
      copy_row(to + lane * 16 + kRowPitch, offset1);
    } else {
      const bool second = lane / 16;
      copy_row(to + (lane % 16) * 16 + second * kRowPitch, second ? offset1 : offset0);
    }
    copy_commit();
    next++;
    look_ahead();
  }
};

struct Converter {
  Stager stage;
  u32 smem;
  int warp, g, r, c;
  u32 tile;                // where the lane stores the first 16 dims of unit 0, tile 0

  DEVICE Converter(const Params& p, u32 smem_base, int warp_, int lane)
      : stage(p, smem_base, warp_, lane), smem(smem_base), warp(warp_), g(lane >> 3),
        r((lane >> 2) & 1), c(lane & 3) {
    tile = smem + kSmemKV + g * kTileGroup + (16 * warp + r) * 128 + (((2 * c) ^ r) << 4);
  }

  // Reads unit u of `block`, which must be the oldest staged one, and starts another in its place.
  template <bool Fp4> DEVICE void take(RawUnit& raw, u32 block, int u) {
    copy_wait<kUnits - 1>();
    __syncwarp();
    const u32 row = stage.ring + (u % kUnits) * kUnitBytes + r * kRowPitch;
    const u32 scale = stage.scales + (block & 1) * kScaleBytes + (2 * u + r) * kScalePitch;
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
    stage.start();
  }

  // 16 dims: 8 columns of even pairs, 8 of odd pairs.
  DEVICE static void store16(u32 at, const u32* even, const u32* odd) {
    store_shared4(at, even);
    store_shared4(at ^ 16, odd);
  }

  DEVICE static void convert16(const u32* codes, u32 factor, u32 at) {
    u32 even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 4; i++) convert_e4m3(codes[i], factor, even[i], odd[i]);
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

  // Scale bytes above 134 (rows beyond 2^15) need their factor in two steps to stay in bf16.
  DEVICE static void multiply_stored(u32 at, u32 scale) {
    const u32 rest = (max(scale, 134u) - 134 + 127) * 0x00800080u;
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      const u32 word = (at ^ (i / 4 * 16)) + i % 4 * 4;
      store_shared(word, mul_bf16x2(load_shared(word), rest));
    }
  }

  template <bool Fp4> DEVICE void convert(const RawUnit& raw, u32 tile_base, int u) {
    const u32 at = (tile_base ^ (((2 * u) & 7) << 4)) + u * 256;
    const u32 far = at + 4 * kTileGroup;  // 256 dims further on
    if (Fp4) {
      float lo, hi;
      unpack_e4m3x2(raw.scale_lo | raw.scale_hi << 8, lo, hi);
      convert16_fp4(raw.lo, lo, at);
      convert16_fp4(raw.hi, hi, far);
    } else {
      convert16(raw.lo, (min(raw.scale_lo, 134u) + 120) * 0x00800080u, at);
      convert16(raw.hi, (min(raw.scale_hi, 134u) + 120) * 0x00800080u, far);
      if (__any_sync(~0u, max(raw.scale_lo, raw.scale_hi) > 134)) {
        multiply_stored(at, raw.scale_lo);
        multiply_stored(far, raw.scale_hi);
      }
    }
  }

  // The next unit is read before the current one is converted, within a block.
  template <bool Fp4> DEVICE void block(u32 number) {
    const u32 x = number & 1, base = tile + x * kTileBytes;
    RawUnit even, odd;
    take<Fp4>(even, number, 0);
    mbar_wait(smem + kBarTileFree + 8 * x, ((number >> 1) & 1) ^ 1);
#pragma unroll 1
    for (int u = 0; u < kUnitsPerBlock; u += 2) {
      take<Fp4>(odd, number, u + 1);
      convert<Fp4>(even, base, u);
      if (u + 2 < kUnitsPerBlock) take<Fp4>(even, number, u + 2);
      convert<Fp4>(odd, base, u + 1);
    }
    fence_async_proxy();
    __syncwarp();
    if (stage.lane == 0) mbar_arrive(smem + kBarTileFull + 8 * x);
  }
};

DEVICE void convert_role(const Params& p, u32 smem, int warp, int first_item, int item_step) {
  bar_sync(kBarStart, 2 * kRoleThreads);  // offsets of the first blocks are there
  Converter cv(p, smem, warp, lane_id());
  u32 block = 0;
  u32 meta = cv.stage.kind;
#pragma unroll 1
  for (int u = 0; u < kUnits; u++) cv.stage.start();
#pragma unroll 1
  for (int item = first_item; item < p.items; block++) {
    if ((meta & kMetaExtra) && p.extra_fp4) cv.block<true>(block);
    else cv.block<false>(block);
    if (meta & kMetaLast) item += item_step;
    meta = load_shared(cv.stage.meta + (block + 1) % kSlots * 4);
  }
  copy_wait<0>();
}
