// Grouped product of MXFP8 operands for sm_90a: out[t, g, d] = sum over r of x[t, g, r] w[g, d, r],
// both e4m3 with one ue8m0 scale for 32 columns, summed in float32, written as bf16.
//
// Both operands become bf16, exactly, on the way to the tensor cores. The weight is wgmma's A
// operand and is converted in the registers of the warps that multiply; activations are its B
// operand and are converted in shared memory. Warpgroups, over rings of stages of 128 columns:
//
//   math       raw -> fragments, wgmma; 64 rows each,    Full, OperandFull -> Free, OperandFree
//              those with the same rows take turns
//   convert    raw activations -> bf16 operand           Full, OperandFree -> OperandFull, Free
//   load       codes and scales of both, by cp.async                               Free -> Full
//
// A CTA has one tile; with few tiles a cluster of `split` CTAs shares a tile's columns and adds its
// partial sums over distributed shared memory.
#include "product_feed.cuh"
#include "product_math.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_product(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 mem[];
  const u32 smem = smem_address(mem);
  const int thread = threadIdx.x % kGroup;
  const int role = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const Share share(p);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      mbar_init(smem + kBarFull + 8 * i, kGroup);
      mbar_init(smem + kBarFree + 8 * i, 4 * (kRowGroups + kConvertGroups));
    }
    for (int i = 0; i < kBuffers; i++) {
      mbar_init(smem + kBarOperandFull + 8 * i, 4 * kConvertGroups);
      mbar_init(smem + kBarOperandFree + 8 * i, 4 * kRowGroups);
    }
    fence_async_proxy();
  }
  __syncthreads();

  if (role >= kMathGroups) {
    if (role < kMathGroups + kConvertGroups) {
      shrink_registers<kConvertRegisters>();
      convert_role(p, smem, threadIdx.x - kMathGroups * kGroup, share);
    } else {
      shrink_registers<kLoadRegisters>();
      load_role(p, smem, thread, share);
    }
    if (p.split > 1) {
      __syncwarp();
      cluster_sync();
      cluster_sync();
    }
  } else {
    grow_registers<kMathRegisters>();
    Math math(p, smem, role, warp);
    math.multiply(share);
    math.add_turns(mem);
    if (p.split > 1) math.store_partial(mem);
    else if (math.turn == 0) math.store(Tile(p, share.first_tile));
    if (p.split > 1) {
      __syncwarp();
      cluster_sync();
      add_partials(p, smem, Tile(p, share.first_tile), share);
      cluster_sync();  // nobody leaves while its sums are read
    }
  }
}
