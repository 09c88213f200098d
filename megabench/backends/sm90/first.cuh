// The start of a cluster's output warps and converters: Q, and the first tile, which everything
// waits for. The output warps have nothing else to do yet, so they take a larger part of it. All
// load records straight from global memory.
#pragma once

#include "cluster.cuh"
#include "convert.cuh"
#include "query.cuh"

struct FirstTile {
  static constexpr int kOutputUnits = 3, kConverterUnits = 2;  // of a warp
  static constexpr int kOutputWarps = 8;
  static_assert(kOutputWarps * kOutputUnits + 4 * kConverterUnits == kBlock / 2);

  const Params& p;
  u32 smem;
  int g, r, c;         // as in Converter
  int unit, units;     // this warp's, of two rows each
  bool fp4;
  RawUnit raw[kOutputUnits];

  // `warp`: the output warps', then the converters'.
  DEVICE FirstTile(const Params& params, u32 smem_base, int warp, int lane)
      : p(params), smem(smem_base), g(lane >> 3), r((lane >> 2) & 1), c(lane & 3),
        unit(warp < kOutputWarps ? kOutputUnits * warp
                                 : kConverterUnits * warp +
                                       kOutputWarps * (kOutputUnits - kConverterUnits)),
        units(warp < kOutputWarps ? kOutputUnits : kConverterUnits) {}

  DEVICE void load() {
    const u32 extra = load_shared(smem + kSmemMeta) & kMetaExtra;
    fp4 = kExtraFp4 && extra;
    const u8* pool = pick(p.pool, extra);
    // a lane's first 16 dims in a row, and their scale; its others are 256 dims further on
    const u32 data = fp4 ? 32 * g + 8 * c : 64 * g + 16 * c, far = fp4 ? 128 : 256;
    const u32 scale = fp4 ? kFp4Data + 4 * g + c : kFp8Data + 2 * g + (c >> 1);
    const u32 offsets = smem + kSmemOffsets + 8 * unit + 4 * r;
#pragma unroll
    for (int u = 0; u < kOutputUnits; u++) {
      RawUnit& to = raw[u];
      to = {};
      if (u >= units) continue;
      const u32 offset = load_shared(offsets + 8 * u);
      if (offset == kNoRow) continue;
      const u8* row = pool + (u64)offset * 16;
      if (kExtraFp4) {  // one code for both types
        load_global2(row + data, to.lo);
        load_global2(row + data + far, to.hi);
        if (!fp4) {
          load_global2(row + data + 8, to.lo + 2);
          load_global2(row + data + far + 8, to.hi + 2);
        }
      } else {
        load_global4(row + data, to.lo);
        load_global4(row + data + far, to.hi);
      }
      to.scale_lo = load_global_byte(row + scale);
      to.scale_hi = load_global_byte(row + scale + (fp4 ? 16 : 8));
    }
  }
  DEVICE void convert() {
#pragma unroll 1
    for (int u = 0; u < units; u++) {
      const u32 row = 2 * (unit + u) + r;
      const u32 at = smem + kSmemKV + g * kTileGroup + row * 128 + (((2 * c) ^ (row & 7)) << 4);
      if (fp4) Converter::convert<true>(raw[0], {at, at ^ 16}, 0);
      else Converter::convert<false>(raw[0], {at, at ^ 16}, 0);
#pragma unroll
      for (int i = 1; i < kOutputUnits; i++) raw[i - 1] = raw[i];
    }
    fence_async_proxy();
    __syncwarp();
  }
};

DEVICE void first_tile(const Params& p, u8* mem, int role, int warp, int item) {
  const bool converts = role == kConvertRole;
  const Lane me(warp + (converts ? FirstTile::kOutputWarps : 4 * (role - kOutputRole)));
  const u32 smem = smem_address(mem);
  const bool leader = me.warp == 0 && me.lane == 0;
  const Query q(p, mem, me);
  if (leader) q.copy_first(item);
  __syncthreads();
  if (leader) q.copy_cos_sin(load_global(p.positions + token_of(p, item)), 0);
  FirstTile tile(p, smem, me.warp, me.lane);
  bar_sync(kBarStart, kThreads);  // its offsets are there
  tile.load();
  tile.convert();
  if (me.lane == 0) mbar_arrive(smem + (converts ? kBarTileFull : kBarFirstTile));
  arrive_early(p);  // only here: compute-sanitizer waits in it until Q's warps arrive
  if (converts) bar_sync(kBarLookahead, 2 * kRoleThreads);  // later offsets are there
}
