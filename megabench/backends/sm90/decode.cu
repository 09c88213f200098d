// Fused mega-attention decode for sm_90a: Q RoPE, sparse attention over quantized paged rows,
// inverse RoPE and the per-32 FP8 cast, in one launch.
//
// Work item: one token x 64 heads. A CTA is persistent over items (split 1), or a cluster of
// `split` CTAs shares one item's blocks and reduces over distributed shared memory (few tokens).
// Very few tokens leave SMs over: several clusters then compute one item, and each reduces a part
// of its heads, for the reduction is the longest step.
// Four roles, one warpgroup each; tiles of 64 KV rows, K = V, double-buffered in bf16:
//
//   convert   records -> staging ring (cp.async) -> bf16 tile              TileFree  -> TileFull
//   scores    Q (bulk copy, RoPE), S^T = K Q^T, softmax, P^T;              TileFull  -> ProbsFull
//             slot ids -> offsets of later blocks
//   output 0  O[64 heads, dims 0..255]   += P V, then the epilogue         ProbsFull -> TileFree
//   output 1  O[64 heads, dims 256..511] += P V, then the epilogue         ProbsFull -> TileFree
//
// TileFree is per 16 rows, so that conversion follows P V through a tile. An item's row sums
// (Inverse) come from the score warps; ItemDone frees its cos/sin and sums.
#include "convert.cuh"
#include "output.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_mega_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 mem[];
  const u32 smem = smem_address(mem);
  const int thread = threadIdx.x;
  const int role = __shfl_sync(~0u, thread / kRoleThreads, 0);
  const int warp = __shfl_sync(~0u, (thread / 32) & 3, 0);
  const int rank = p.split > 1 ? cluster_rank() : 0;
  const int cluster = blockIdx.x / p.split, first_item = cluster / p.replicas;
  const int item_step = gridDim.x / p.split;

  if (thread == 0) {
    for (int x = 0; x < 2; x++) {
      mbar_init(smem + kBarTileFull + 8 * x, 4);
      for (int s = 0; s < kSteps; s++) mbar_init(smem + kBarTileFree + 8 * (x * kSteps + s), 8);
      mbar_init(smem + kBarProbsFull + 8 * x, 4);
    }
    mbar_init(smem + kBarInverse, 2);
    mbar_init(smem + kBarItemDone, 8);
    mbar_init(smem + kBarQ, 1);
    fence_async_proxy();
  }
  __syncthreads();

  if (role == 0) {
    shrink_registers<kConvertRegisters>();
    convert_role(p, smem, warp, first_item, item_step);
    if (p.split > 1) {
      cluster_meet();
      cluster_sync();
    }
  } else if (role == 1) {
    shrink_registers<kScoreRegisters>();
    score_role(p, mem, warp, first_item, item_step, rank);
  } else {
    grow_registers<kOutputRegisters>();
    output_role(p, mem, warp, role - 2, first_item, item_step, rank);
  }
}
