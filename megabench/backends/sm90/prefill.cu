// Fused mega-attention prefill for sm_90a: Q RoPE, sparse attention over gathered bf16 rows,
// inverse RoPE and the per-32 FP8 cast, in one launch.
//
// Work item: one token x 64 heads; a CTA is persistent over items. Four roles, one warpgroup each,
// over a ring of tiles of 64 KV rows (K = V):
//
//   load      Q and KV rows by cp.async                               TileFree  -> TileFull
//   scores    S = Q K^T (Q mostly in registers), softmax, P           TileFull  -> ProbsFull
//   output 0  O[64 heads, dims 0..255]   += P V, then the epilogue    ProbsFull -> TileFree
//   output 1  O[64 heads, dims 256..511] += P V, then the epilogue    ProbsFull -> TileFree
//
// Q goes through the ring like a tile; its first dims stay in shared memory (QFull, QFree). An
// item's inverse sums come with its last probabilities.
#include "prefill_load.cuh"
#include "prefill_output.cuh"
#include "prefill_scores.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_mega_prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 mem[];
  const u32 smem = smem_address(mem);
  const int role = __shfl_sync(~0u, threadIdx.x / kRoleThreads, 0);
  const int warp = __shfl_sync(~0u, (threadIdx.x / 32) & 3, 0);

  if (threadIdx.x == 0) {
    for (u32 i = 0; i < kSlots; i++) {
      mbar_init(smem + kBarTileFull + 8 * i, kRoleThreads);
      mbar_init(smem + kBarTileFree + 8 * i, 8);
    }
    for (u32 i = 0; i < kProbSlots; i++) {
      mbar_init(smem + kBarProbsFull + 8 * i, 4);
      mbar_init(smem + kBarProbsFree + 8 * i, 8);
    }
    mbar_init(smem + kBarQFull, kRoleThreads);
    mbar_init(smem + kBarQFree, 4);
    fence_async_proxy();
  }
  __syncthreads();

  if (role == 0) {
    shrink_registers<kLoaderRegisters>();
    loader_role(p, smem, blockIdx.x, gridDim.x);
  } else if (role == 1) {
    grow_registers<kScoreRegisters>();
    Scores(p, smem, Lane(warp)).run(blockIdx.x, gridDim.x);
  } else {
    grow_registers<kOutputRegisters>();
    Output(p, smem, Lane(warp), role - 2).run(blockIdx.x, gridDim.x);
  }
}
