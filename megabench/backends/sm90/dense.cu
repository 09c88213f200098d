// Grouped product of MXFP8 activations and a bf16 weight for sm_90a, for many tokens.
//
// Activations are wgmma's A operand: their codes become bf16 fragments in the registers of the
// warps that multiply. The weight was laid out in pieces that are B operands as they lie.
// Persistent over tiles of 128 tokens x kWidth rows; three warpgroups:
//
//   math x 2   64 tokens each: raw -> fragments, wgmma, store   Full, SlabFull -> Free, SlabFree
//   load       a warp for each: raw activations by tensor       Free, SlabFree -> Full, SlabFull
//              copies, pieces by bulk copies, scales
#include "dense.cuh"
#include "fragments.cuh"

constexpr int kFullArrivals = 1 + 32;     // the tensor copy, and a warp with scales

DEVICE void load_raw(const Params& p, u32 smem) {
  Ring<kStages> ring;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Tile t(p, tile);
#pragma unroll 1
    for (int word = 0; word < p.words; word++, ring.advance()) {
      const u32 full = smem + kBarFull + 8 * ring.slot;
      mbar_wait(smem + kBarFree + 8 * ring.slot, ring.parity ^ 1);
      mbar_arrive_expect(full, kRawBytes);
      tensor_copy(smem + kSmemRaw + ring.slot * kRawBytes, &p.x, word * kColumns, t.group, t.token,
                  full);
    }
  }
}

DEVICE void load_scales(const Params& p, u32 smem, int lane) {
  Ring<kStages> ring;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Tile t(p, tile);
    const u32* from =
        p.x_scale + t.group * p.x_scale_group + (t.token + lane) * p.x_scale_token;
    const int live = p.tokens - t.token;
#pragma unroll 1
    for (int word = 0; word < p.words; word++, ring.advance(), from += p.x_scale_word) {
      mbar_wait(smem + kBarFree + 8 * ring.slot, ring.parity ^ 1);
      const u32 to = smem + kSmemScales + ring.slot * kScaleBytes + lane * 4;
#pragma unroll
      for (int i = 0; i < kTokens; i += 32)
        copy4(to + i * 4, from + i * p.x_scale_token, lane + i < live ? 4 : 0);
      arrive_after_copies(smem + kBarFull + 8 * ring.slot);
    }
  }
}

DEVICE void load_pieces(const Params& p, u32 smem) {
  Ring<kSlabs> slabs;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Tile t(p, tile);
    const u8* w = p.w + (i64)(t.group * p.row_tiles + t.row_tile) * p.words * (2 * kSlabBytes);
#pragma unroll 1
    for (int i = 0; i < 2 * p.words; i++, slabs.advance(), w += kSlabBytes) {
      const u32 full = smem + kBarSlabFull + 8 * slabs.slot;
      mbar_wait(smem + kBarSlabFree + 8 * slabs.slot, slabs.parity ^ 1);
      mbar_arrive_expect(full, kSlabBytes);
      bulk_copy(smem + slabs.slot * kSlabBytes, w, kSlabBytes, full);
    }
  }
}

struct Math {
  const Params& p;
  u32 smem;
  int lane, row, col;      // row = lane / 4, col = lane % 4: the place in a fragment
  int first_token;         // the warp's first token in the tile
  float acc[kWidth / 2];
  Ring<kStages> ring;
  Ring<kSlabs> slabs;
  u32 multiplied = 0;      // the piece before the current one

  DEVICE Math(const Params& params, u32 smem_, int group, int warp)
      : p(params), smem(smem_), lane(lane_id()), row(lane >> 2), col(lane & 3),
        first_token(group * 64 + warp * 16) {}

  // acc (+)= 128 columns. A piece's 64 are converted while those before are multiplied.
  DEVICE void stage(bool first) {
    const u32 raw = smem + kSmemRaw + ring.slot * kRawBytes + matrix_row(first_token, lane);
    const u32 at = smem + kSmemScales + ring.slot * kScaleBytes + (first_token + row) * 4;
    mbar_wait(smem + kBarFull + 8 * ring.slot, ring.parity);
    const u32 scales[2] = {load_shared(at), load_shared(at + 32)};
    Codes codes[2];
    load_matrix_codes(0, raw, lane, codes[0]);
    load_matrix_codes(1, raw, lane, codes[1]);
    const bool large = __any_sync(~0u, has_large(scales[0] | scales[1]));
    Fragments a[2][2];  // of 64 columns each
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int q = 0; q < 2; q++) widen_block(2 * h + q, codes[q], scales, large, a[h][q]);
      if (h == 0) {
        load_matrix_codes(2, raw, lane, codes[0]);
        load_matrix_codes(3, raw, lane, codes[1]);
      } else {
        __syncwarp();
        if (lane == 0) mbar_arrive(smem + kBarFree + 8 * ring.slot);
      }
      mbar_wait(smem + kBarSlabFull + 8 * slabs.slot, slabs.parity);
      const u64 b = tile_descriptor<128>(smem + slabs.slot * kSlabBytes, 16);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; i++)
        wgmma_from_registers<kWidth>(acc, a[h][i / 2][i % 2], b + descriptor_step(i * 32),
                                     !(first && h == 0 && i == 0));
      wgmma_commit();
      wgmma_wait<1>();
      if (!(first && h == 0)) free_slab();  // the piece before has been multiplied
      multiplied = slabs.slot;
      slabs.advance();
    }
    ring.advance();
  }

  DEVICE void free_slab() const {
    if (lane == 0) mbar_arrive(smem + kBarSlabFree + 8 * multiplied);
  }

  DEVICE void multiply() {
#pragma unroll 1
    for (int word = 0; word < p.words; word++) stage(word == 0);
    wgmma_wait<0>();
    pin(acc);
    free_slab();
  }

  // The pieces' row order gives a lane eight neighbouring rows in every 32.
  DEVICE void store(const Tile& t) const {
    u16* out = p.out + t.group * p.out_group + (t.token + first_token + row) * p.out_token +
               t.row_tile * kWidth + 8 * col;
    const int live = p.tokens - t.token - first_token - row;
#pragma unroll
    for (int half = 0; half < 2; half++, out += 8 * p.out_token) {
      if (8 * half >= live) continue;
#pragma unroll
      for (int j = 0; j < kWidth / 32; j++) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          v[i] = pack_bf16(acc[16 * j + 4 * i + 2 * half], acc[16 * j + 4 * i + 2 * half + 1]);
        *(uint4*)(out + 32 * j) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_dense_product(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 mem[];
  const u32 smem = smem_address(mem);
  const int thread = threadIdx.x % kGroup;
  const int role = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int warp = __shfl_sync(~0u, thread / 32, 0);

  if (threadIdx.x == 0) {
    prefetch_map(&p.x);
    for (int i = 0; i < kStages; i++) {
      mbar_init(smem + kBarFull + 8 * i, kFullArrivals);
      mbar_init(smem + kBarFree + 8 * i, 8);
    }
    for (int i = 0; i < kSlabs; i++) {
      mbar_init(smem + kBarSlabFull + 8 * i, 1);
      mbar_init(smem + kBarSlabFree + 8 * i, 8);
    }
    fence_async_proxy();
  }
  __syncthreads();

  if (role == 2) {
    shrink_registers<kLoadRegisters>();
    if (thread == 0) load_raw(p, smem);
    if (thread == 32) load_pieces(p, smem);
    if (warp == 2) load_scales(p, smem, thread % 32);
  } else {
    grow_registers<kMathRegisters>();
    Math math(p, smem, role, warp);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
      math.multiply();
      math.store(Tile(p, tile));
    }
  }
}
