// Fused mega-attention decode for sm_90a: Q RoPE, sparse attention over quantized paged rows,
// inverse RoPE and the per-32 FP8 cast, in one launch.
//
// Work item: one token x 64 heads. Two builds: a CTA is persistent over items, or a cluster of
// `split` CTAs shares one item's blocks and reduces over distributed shared memory (few tokens).
// Very few tokens leave SMs over: several clusters then compute one item, and each reduces a part
// of its output, for the reduction is the longest step.
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
// Start: lengths and slot ids are read together, before the CTA's threads meet; the output warps
// copy Q. In a cluster, they and the converters share the first tile (FirstTile).
//
// A kernel's first 64 KB of code or so are there when it starts, the rest comes from memory: few
// tokens waited 1 to 4 us for it. So clusters have a build of their own, in which the converters,
// whose code runs straight and not at all where a CTA has one block, come last, and the less
// frequent of two record types has a short loop.
#include "first.cuh"
#include "output.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_mega_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 mem[];
  const u32 smem = smem_address(mem);
  const int thread = threadIdx.x;
  const int role = __shfl_sync(~0u, thread / kRoleThreads, 0);
  const int warp = __shfl_sync(~0u, (thread / 32) & 3, 0);
  const int rank = kClustered ? cluster_rank() : 0;
  // A cluster is a row of the grid, a power of two of rows an item.
  const int first_item = kClustered ? blockIdx.y >> (31 - __clz(p.replicas)) : blockIdx.x;
  const int item_step = kClustered ? p.items : gridDim.x;  // a cluster has one item

  if (thread == 0) {
    for (int x = 0; x < 2; x++) {
      mbar_init(smem + kBarTileFull + 8 * x, 4);
      for (int s = 0; s < kSteps; s++) mbar_init(smem + kBarTileFree + 8 * (x * kSteps + s), 8);
      mbar_init(smem + kBarProbsFull + 8 * x, 4);
    }
    mbar_init(smem + kBarInverse, 2);
    mbar_init(smem + kBarItemDone, 8);
    fence_async_proxy();
  }

  // in this order in memory, as compiled, with clusters: first tile, output, scores, convert
  if (kClustered && role != kScoreRole) first_tile(p, mem, role, warp, first_item);
  if (role == kConvertRole) {
    shrink_registers<kConvertRegisters>();
    if (kClustered) {
      const bool only = load_shared(smem + kSmemMeta) & kMetaLast;
      if (!only) convert_role(p, smem, warp, first_item, item_step, 1);
      meet(p);
      cluster_sync();
    } else {
      __syncthreads();
      bar_sync(kBarStart, kThreads);  // the offsets of block 0 are there
      convert_role(p, smem, warp, first_item, item_step, 0);
    }
  } else if (role == kScoreRole) {
    shrink_registers<kScoreRegisters>();
    score_role(p, mem, warp, first_item, item_step, rank);
  } else {
    grow_registers<kOutputRegisters>();
    output_role(p, mem, warp, role - kOutputRole, first_item, item_step, rank);
  }
}
