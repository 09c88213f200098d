// Grouped product of MXFP8 operands for sm_90a: out[t, g, d] = sum over r of x[t, g, r] w[g, d, r],
// both e4m3 with one ue8m0 scale for 32 columns, summed in float32, written as bf16.
//
// Both operands become f16, exactly, on the way to the tensor cores. The weight is wgmma's A
// operand and is converted in the registers of the warps that multiply; activations are its B
// operand and are converted into shared memory. Warpgroups, over rings of stages of 128 columns:
//
//   math x 2   codes -> fragments, wgmma; 64 rows each      WFull, OperandFull -> WFree, OperandFree
//   convert    activations' codes -> operand                XFull, OperandFree -> OperandFull
//   load       two warps, a ring each: boxes of codes by    OperandFull, WFree -> XCopied, WCopied
//              the copy engine, scales                      (scales), XFull, WFull (codes)
//              two warps, a side each: scales -> factors    XCopied, WCopied -> XFull, WFull
//
// With 128 tokens shared memory moves 128 bytes in 1,280 of a stage's 1,330 cycles, and beside
// wgmma every other instruction takes 3 to 4 cycles of its scheduler. So the loops of the first two
// have few but conversions: a stage's address is all they keep of a ring, scales come to them as
// factors, and the two convert warpgroups that there are then take stages in turn. Code that runs
// once is fetched for it, at several cycles an instruction: it is short where it can be.
//
// A scale that f16 has no room for (mxfp8.cuh) is replaced where all its codes are zeros.
// Where they are not, a flag sends all roles over the columns again, in bf16, which has room.
//
// A CTA has one tile; with few tiles a cluster of kSplit CTAs shares a tile's columns, and each
// adds all partial sums of its part of them.
#include "product_math.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_product(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 mem[];
  const u32 smem = smem_address(mem);
  const int role = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Part part(p);
  if (warp == kThreads / 32 - 1) prefetch_start(p, part);

  if (role < kRowGroups) {
    grow_registers<kMathRegisters>();
    Math math(p, mem, part, role, warp % 4);
    math.init_barriers();
    meet();
    math.finish(math.multiply_all());
  } else if (role < kRowGroups + kConvertGroups) {
    shrink_registers<kConvertRegisters>();
    convert_role(smem, warp - 4 * kRowGroups, part);
  } else {
    shrink_registers<kLoadRegisters>();
    if (warp % 4 == 0) load_activations(p, smem, part);
    else if (warp % 4 == 1) load_weight(p, smem, part);
    else if (warp % 4 == 2) scale_activations(p, smem, part);
    else scale_weight(p, smem, part);
  }
}
