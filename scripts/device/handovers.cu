// What racecheck follows: hand-overs through shared memory as the sm90 kernels make them, one a
// kernel. Names that begin with `right_` are ordered by PTX's memory model, those with `wrong_` are
// not: what the tool says of the first is a false alarm, what it leaves out of the second is missed.
//
//   nvcc -std=c++17 -lineinfo -gencode arch=compute_90a,code=sm_90a -I megabench/backends/sm90 \
//       scripts/device/handovers.cu -o build/handovers
//   compute-sanitizer --tool racecheck --print-limit 0 --racecheck-report analysis build/handovers
#include <cstdio>

#include "ring.cuh"
#include "wgmma.cuh"

constexpr int kWarp = 32, kGroup = 128;

// Two groups of threads: one writes words, the other reads words that other threads wrote.
struct Shared {
  u32 words[kGroup];
  u64 full, free, third;
};
#define KERNEL(name) extern "C" __global__ void name(u32* out, const u32* in)
#define SETUP(full_count, free_count)                                          \
  __shared__ __align__(128) Shared s;                                          \
  const int t = threadIdx.x;                                                   \
  volatile u32* const w = s.words;                                             \
  const u32 words = smem_address(s.words), full = smem_address(&s.full),       \
            free = smem_address(&s.free), third = smem_address(&s.third);      \
  if (t == 0) {                                                                \
    mbar_init(full, full_count);                                               \
    mbar_init(free, free_count);                                               \
    mbar_init(third, 1);                                                       \
    fence_async_proxy();                                                       \
  }                                                                            \
  __syncthreads();                                                             \
  (void)w, (void)words, (void)full, (void)free, (void)third, (void)in
// Macros, so that the tool names the kernel.
#define PUT(i, value) w[i] = value
#define OTHER(n) w[(t + 5) % (n)]

// ---- full: written words are handed to another group
KERNEL(right_full_by_every_lane) {
  SETUP(kWarp, 1);
  if (t < kWarp) {
    PUT(t, t);
    mbar_arrive(full);
  } else {
    mbar_wait(full, 0);
    out[t] = OTHER(kWarp);
  }
}
KERNEL(right_full_by_one_lane_after_syncwarp) {
  SETUP(1, 1);
  if (t < kWarp) {
    PUT(t, t);
    __syncwarp();
    if (t == 0) mbar_arrive(full);
  } else {
    mbar_wait(full, 0);
    out[t] = OTHER(kWarp);
  }
}
KERNEL(wrong_full_by_one_lane) {
  SETUP(1, 1);
  if (t < kWarp) {
    PUT(t, t);
    if (t == 0) mbar_arrive(full);
  } else {
    mbar_wait(full, 0);
    out[t] = OTHER(kWarp);
  }
}
KERNEL(right_full_by_one_thread_after_bar) {
  SETUP(1, 1);
  if (t < kGroup) {
    PUT(t, t);
    bar_sync(1, kGroup);
    if (t == 0) mbar_arrive(full);
  } else {
    mbar_wait(full, 0);
    out[t] = OTHER(kGroup);
  }
}
KERNEL(right_full_through_a_third_warp) {
  SETUP(kWarp, 1);
  if (t < kWarp) {
    PUT(t, t);
    mbar_arrive(full);
  } else if (t < 2 * kWarp) {
    mbar_wait(full, 0);
    __syncwarp();
    if (t == kWarp) mbar_arrive(third);
  } else {
    mbar_wait(third, 0);
    out[t] = OTHER(kWarp);
  }
}
KERNEL(right_full_by_named_barrier) {
  SETUP(1, 1);
  if (t < kWarp) {
    PUT(t, t);
    bar_arrive(1, 2 * kWarp);
  } else {
    bar_sync(1, 2 * kWarp);
    out[t] = OTHER(kWarp);
  }
}
KERNEL(right_full_by_one_waiter_after_syncwarp) {  // one lane waits for all
  SETUP(kWarp, 1);
  if (t < kWarp) {
    PUT(t, t);
    mbar_arrive(full);
  } else {
    if (t == kWarp) mbar_wait(full, 0);
    __syncwarp();
    out[t] = OTHER(kWarp);
  }
}

// ---- free: read words are handed back to be written again
KERNEL(right_free_by_one_lane_after_syncwarp) {
  SETUP(1, 1);
  if (t < kWarp) {
    PUT(t, t);
    __syncwarp();
    out[t] = OTHER(kWarp);
    __syncwarp();
    if (t == 0) mbar_arrive(free);
  } else {
    mbar_wait(free, 0);
    PUT(t % kWarp, t);
  }
}
KERNEL(wrong_free_by_one_lane) {
  SETUP(1, 1);
  if (t < kWarp) {
    PUT(t, t);
    __syncwarp();
    out[t] = OTHER(kWarp);
    if (t == 0) mbar_arrive(free);
  } else {
    mbar_wait(free, 0);
    PUT(t % kWarp, t);
  }
}

// ---- asynchronous copies
KERNEL(right_copies_announced_on_an_mbarrier) {
  SETUP(kWarp, 1);
  if (t < kWarp) {
    copy4(words + 4 * t, in + t);
    arrive_after_copies(full);
    copy_wait<0>();
  } else {
    mbar_wait(full, 0);
    out[t] = OTHER(kWarp);
  }
}
KERNEL(right_copies_waited_for_in_the_warp) {
  SETUP(1, 1);
  if (t < kWarp) {
    copy4(words + 4 * t, in + t);
    copy_commit();
    copy_wait<0>();
    __syncwarp();
    out[t] = OTHER(kWarp);
  }
}
KERNEL(right_copies_over_words_handed_back) {
  SETUP(1, 1);
  if (t < kWarp) {
    PUT(t, t);
    __syncwarp();
    out[t] = OTHER(kWarp);
    __syncwarp();
    if (t == 0) mbar_arrive(free);
  } else {
    mbar_wait(free, 0);
    copy4(words + 4 * (t % kWarp), in + t);
    copy_wait<0>();
  }
}
KERNEL(right_bulk_copy) {
  SETUP(1, 1);
  if (t == 0) {
    mbar_arrive_expect(full, 4 * kWarp);
    bulk_copy(words, in, 4 * kWarp, full);
  }
  mbar_wait(full, 0);
  out[t] = OTHER(kWarp);
}
KERNEL(wrong_bulk_copy_not_waited_for) {
  SETUP(1, 1);
  if (t == 0) {
    mbar_arrive_expect(full, 4 * kWarp);
    bulk_copy(words, in, 4 * kWarp, full);
  }
  out[t] = OTHER(kWarp);
  mbar_wait(full, 0);
}

// ---- the same value from every lane
KERNEL(wrong_same_value_by_every_lane) {
  SETUP(1, 1);
  if (t < 2 * kWarp) {
    PUT(0, 7);
    out[t] = w[t / (2 * kWarp)];  // the word, unknown to the compiler
  }
}

// ---- tensor cores
DEVICE void product(u32 tile, u32* out, int t) {
  float d[32] = {};
  wgmma_fence();
  wgmma_m64n64(d, tile_descriptor<128>(tile, 16), tile_descriptor<128>(tile, 16), 0);
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  out[t] = __float_as_uint(d[0]);
}
KERNEL(right_wgmma_of_written_tile) {
  extern __shared__ __align__(1024) u8 mem[];
  SETUP(1, 1);
  const u32 tile = smem_address(mem);
  for (int i = t; i < 64 * 32; i += kGroup) store_shared(tile + 4 * i, i);
  fence_async_proxy();
  bar_sync(1, kGroup);
  product(tile, out, t);
}
KERNEL(wrong_wgmma_of_tile_being_written) {
  extern __shared__ __align__(1024) u8 mem[];
  SETUP(1, 1);
  const u32 tile = smem_address(mem);
  for (int i = t; i < 64 * 32; i += kGroup) store_shared(tile + 4 * i, i);
  fence_async_proxy();
  product(tile, out, t);
}

// ---- clusters of two
KERNEL(right_cluster) {
  SETUP(1, 1);
  cluster_sync();
  store_remote2(map_to_rank(words, cluster_rank() ^ 1) + 8 * (t % kWarp), 1.f, 2.f);
  cluster_sync();
  out[t] = OTHER(kWarp);
}
KERNEL(wrong_cluster) {
  SETUP(1, 1);
  cluster_sync();
  store_remote2(map_to_rank(words, cluster_rank() ^ 1) + 8 * (t % kWarp), 1.f, 2.f);
  out[t] = OTHER(kWarp);
  cluster_sync();
}
KERNEL(right_cluster_over_words) {
  SETUP(1, 1);
  PUT(t, t);
  cluster_sync();
  store_remote2(map_to_rank(words, cluster_rank() ^ 1) + 8 * (t % kWarp), 1.f, 2.f);
  cluster_sync();
  out[t] = OTHER(kWarp);
}
KERNEL(right_cluster_over_copies) {
  SETUP(1, 1);
  copy4(words + 4 * t, in + t);
  copy_commit();
  copy_wait<0>();
  cluster_sync();
  store_remote2(map_to_rank(words, cluster_rank() ^ 1) + 8 * (t % kWarp), 1.f, 2.f);
  cluster_sync();
  out[t] = OTHER(kWarp);
}
KERNEL(wrong_cluster_over_words_relaxed) {  // cluster_meet orders no stores
  SETUP(1, 1);
  PUT(t, t);
  cluster_meet();
  store_remote2(map_to_rank(words, cluster_rank() ^ 1) + 8 * (t % kWarp), 1.f, 2.f);
  cluster_sync();
  out[t] = OTHER(kWarp);
}
KERNEL(wrong_cluster_over_copies_relaxed) {
  SETUP(1, 1);
  copy4(words + 4 * t, in + t);
  copy_commit();
  copy_wait<0>();
  cluster_meet();
  store_remote2(map_to_rank(words, cluster_rank() ^ 1) + 8 * (t % kWarp), 1.f, 2.f);
  cluster_sync();
  out[t] = OTHER(kWarp);
}

using Entry = void (*)(u32*, const u32*);
static void launch(Entry kernel, int threads, int ctas, u32* out, const u32* in) {
  cudaLaunchConfig_t config = {};
  config.gridDim = ctas, config.blockDim = threads, config.dynamicSmemBytes = 16384;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {(unsigned)ctas, 1, 1};
  config.attrs = &cluster, config.numAttrs = ctas > 1;
  cudaLaunchKernelEx(&config, kernel, out, in);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) printf("%s\n", cudaGetErrorString(error));
}

int main() {
  u32 *out, *in;
  cudaMalloc(&out, 4096);
  cudaMalloc(&in, 4096);
  cudaMemset(in, 1, 4096);
  for (Entry kernel : {right_full_by_every_lane, right_full_by_one_lane_after_syncwarp,
                       wrong_full_by_one_lane, right_full_by_named_barrier,
                       right_full_by_one_waiter_after_syncwarp,
                       right_free_by_one_lane_after_syncwarp, wrong_free_by_one_lane,
                       right_copies_announced_on_an_mbarrier, right_copies_waited_for_in_the_warp,
                       right_copies_over_words_handed_back, right_bulk_copy,
                       wrong_bulk_copy_not_waited_for, wrong_same_value_by_every_lane})
    launch(kernel, 2 * kWarp, 1, out, in);
  launch(right_full_through_a_third_warp, 3 * kWarp, 1, out, in);
  launch(right_full_by_one_thread_after_bar, 2 * kGroup, 1, out, in);
  for (Entry kernel : {right_wgmma_of_written_tile, wrong_wgmma_of_tile_being_written})
    launch(kernel, kGroup, 1, out, in);
  for (Entry kernel : {right_cluster, wrong_cluster, right_cluster_over_words,
                       right_cluster_over_copies, wrong_cluster_over_words_relaxed,
                       wrong_cluster_over_copies_relaxed})
    launch(kernel, 2 * kWarp, 2, out, in);
}
