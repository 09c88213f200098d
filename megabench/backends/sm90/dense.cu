// Grouped product of MXFP8 activations and a bf16 weight for sm_90a, for many tokens.
//
// Activations are wgmma's A operand: their codes go from memory into the registers of the warps
// that multiply, and become bf16 fragments there. The weight was laid out in pieces that are B
// operands as they lie. Persistent over tiles of 128 tokens x kWidth rows; three warpgroups:
//
//   math x 2   64 tokens each: codes -> fragments, wgmma, store      Full -> Free
//   load       one thread: pieces by bulk copies                     Free -> Full
//
// Lane 4g + c has 16 codes of rows g and g + 8: columns 16c.. of 64. Its word s of them makes the
// fragment of step s, an order of columns that the pieces have too.
#include "dense.cuh"

DEVICE void load_role(const Params& p, u32 smem) {
  Ring<kSlots> ring;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Tile t(p, tile);
    constexpr int kParts = kPieceRows / kWidth;
    const i64 piece = (i64)(t.group * (p.row_tiles / kParts) + t.row_tile / kParts) * p.words * 2;
    const u8* w = p.w + piece * kPieceBytes + t.row_tile % kParts * kSlotBytes;
#pragma unroll 1
    for (int i = 0; i < 2 * p.words; i++, ring.advance(), w += kPieceBytes) {
      const u32 full = smem + kBarFull + 8 * ring.slot;
      mbar_wait(smem + kBarFree + 8 * ring.slot, ring.parity ^ 1);
      mbar_arrive_expect(full, kSlotBytes);
      bulk_copy(smem + ring.slot * kSlotBytes, w, kSlotBytes, full);
    }
  }
}

// Where a lane's activations come from, one word (128 columns) of its two rows at a time, tile
// after tile. Tokens past the last read as zeros.
struct Source {
  const Params& p;
  const u8* x;
  const u32* scale;
  int tile, word, live, first_token, column;

  DEVICE Source(const Params& params, int first_token_, int column_)
      : p(params), tile(blockIdx.x), first_token(first_token_), column(column_) {
    enter();
  }
  DEVICE void enter() {
    const Tile t(p, tile);
    const int token = t.token + first_token;
    word = 0;
    live = tile < p.tiles ? p.tokens - token : 0;
    x = p.x + t.group * p.x_group + token * p.x_token + column;
    scale = p.x_scale + t.group * p.x_scale_group + token * p.x_scale_token;
  }
  DEVICE void load(int half, u32 (&codes)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (8 * r < live) v = __ldg((const uint4*)(x + 8 * r * p.x_token + half * 64));
      codes[r][0] = v.x, codes[r][1] = v.y, codes[r][2] = v.z, codes[r][3] = v.w;
    }
  }
  DEVICE void load_scales(u32 (&scales)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++)
      scales[r] = 8 * r < live ? __ldg(scale + 8 * r * p.x_scale_token) : 0;
  }
  DEVICE void advance() {
    x += kColumns;
    scale += p.x_scale_word;
    if (++word == p.words) {
      tile += gridDim.x;
      enter();
    }
  }
};

struct Math {
  const Params& p;
  u32 smem;
  int lane, row, col;      // row = lane / 4, col = lane % 4: the place in a fragment
  int first_token;         // the warp's first token in the tile
  float acc[kWidth / 2];
  Ring<kSlots> ring;
  u32 multiplied = 0;      // the slot before the current one
  Source source;
  u32 codes[2][2][4], scales[2];  // the next word: [64 columns][row, row + 8]

  DEVICE Math(const Params& params, u32 smem_, int group, int warp)
      : p(params), smem(smem_), lane(lane_id()), row(lane >> 2), col(lane & 3),
        first_token(group * 64 + warp * 16), source(params, first_token + row, 16 * col) {
    source.load(0, codes[0]);
    source.load(1, codes[1]);
    source.load_scales(scales);
    source.advance();
  }

  // Fragments of 64 columns: [step][wgmma's four registers].
  DEVICE static void widen_piece(const u32 (&codes)[2][4], const u32 (&scale)[2], bool large,
                                 u32 (&a)[4][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 factor = first_factor(scale[r]);
#pragma unroll
      for (int s = 0; s < 4; s++) widen(codes[r][s], factor, a[s][r], a[s][r + 2]);
    }
    if (large) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 rest = rest_factor(scale[r]);
#pragma unroll
        for (int s = 0; s < 4; s++) {
          a[s][r] = mul_bf16x2(a[s][r], rest);
          a[s][r + 2] = mul_bf16x2(a[s][r + 2], rest);
        }
      }
    }
  }

  // acc (+)= 128 columns. A piece's 64 are converted while those before are multiplied; the next
  // word's codes are on their way.
  DEVICE void multiply_word(bool first) {
    const bool large = __any_sync(~0u, has_large(scales[0] | scales[1]));
    const u32 now[2] = {scales[0] >> (col / 2 * 8), scales[1] >> (col / 2 * 8)};
    source.load_scales(scales);
    u32 a[2][4][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 scale[2] = {byte_of(now[0], 2 * h), byte_of(now[1], 2 * h)};
      widen_piece(codes[h], scale, large, a[h]);
      source.load(h, codes[h]);
      mbar_wait(smem + kBarFull + 8 * ring.slot, ring.parity);
      const u64 b = tile_descriptor<128>(smem + ring.slot * kSlotBytes, 16);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; s++)
        wgmma_from_registers<kWidth>(acc, a[h][s], b + descriptor_step(s * 32),
                                     !(first && h == 0 && s == 0));
      wgmma_commit();
      wgmma_wait<1>();
      if (!(first && h == 0)) free_slot();  // the piece before has been multiplied
      multiplied = ring.slot;
      ring.advance();
    }
    source.advance();
  }

  DEVICE void free_slot() const {
    if (lane == 0) mbar_arrive(smem + kBarFree + 8 * multiplied);
  }

  DEVICE void multiply() {
#pragma unroll 1
    for (int word = 0; word < p.words; word++) multiply_word(word == 0);
    wgmma_wait<0>();
    pin(acc);
    free_slot();
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
  const int role = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x % kGroup / 32, 0);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; i++) {
      mbar_init(smem + kBarFull + 8 * i, 1);
      mbar_init(smem + kBarFree + 8 * i, 8);
    }
    fence_async_proxy();
  }
  __syncthreads();

  if (role == 2) {
    shrink_registers<kLoadRegisters>();
    if (threadIdx.x % kGroup == 0) load_role(p, smem);
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
