// Names for the PTX this backend uses: mbarriers, named barriers, cp.async, clusters, conversions.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarriers
DEVICE void mbar_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void mbar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
DEVICE void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nRETRY:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra RETRY;\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

DEVICE void mbar_arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

// ---- named barriers over part of the CTA
DEVICE void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE bool bar_any(int id, int threads, bool value) {
  u32 any;
  asm volatile(
      "{\n.reg .pred mine, all;\nsetp.ne.u32 mine, %1, 0;\n"
      "bar.red.or.pred all, %2, %3, mine;\nselp.u32 %0, 1, 0, all;\n}"
      : "=r"(any)
      : "r"((u32)value), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

// Ordinary shared stores become visible to wgmma.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int Registers> DEVICE void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> DEVICE void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- asynchronous copies; `bytes` 0 writes zeros and reads nothing
DEVICE void copy16(u32 dst, const void* src, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
DEVICE void copy16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
DEVICE void copy4(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending> DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}
// One thread copies `bytes` (a multiple of 16) and counts them on `bar`.
DEVICE void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(dst), "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
// A box of a tensor of three dimensions, as its map says; zeros where it reaches outside.
struct alignas(64) TensorMap {
  u64 opaque[16];
};
DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
DEVICE void tensor_copy(u32 dst, const TensorMap* map, int x, int y, int z, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst), "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
      : "memory");
}
DEVICE void tensor_copy_once(u32 dst, const TensorMap* map, int x, int y, int z, u32 bar,
                             u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(dst), "l"(map), "r"(x), "r"(y),
      "r"(z), "r"(bar), "l"(policy)
      : "memory");
}
DEVICE void bulk_prefetch_l2(const void* p, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

// ---- shared and global memory
DEVICE u32 load_shared(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
DEVICE u32 load_shared_byte(u32 a) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
DEVICE void store_shared(u32 a, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory");
}
DEVICE void load_shared2(u32 a, u32& x, u32& y) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(a) : "memory");
}
// 1, 2, 4 or 8 bytes
template <int Bytes> DEVICE void load_bytes(u32 a, u32 (&v)[2]) {
  if constexpr (Bytes == 1) v[0] = load_shared_byte(a);
  else if constexpr (Bytes == 2)
    asm volatile("{\n.reg .b16 h;\nld.shared.b16 h, [%1];\ncvt.u32.u16 %0, h;\n}"
                 : "=r"(v[0])
                 : "r"(a)
                 : "memory");
  else if constexpr (Bytes == 4) v[0] = load_shared(a);
  else load_shared2(a, v[0], v[1]);
}
// 1, 2 or 4 bytes
template <int Bytes> DEVICE void store_bytes(u32 a, u32 v) {
  if constexpr (Bytes == 1) asm volatile("st.shared.u8 [%0], %1;" ::"r"(a), "r"(v) : "memory");
  else if constexpr (Bytes == 2)
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"((u16)v) : "memory");
  else store_shared(a, v);
}
DEVICE void load_shared4(u32 a, u32* v) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(a)
               : "memory");
}
DEVICE void store_shared4(u32 a, const u32* v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v[0]), "r"(v[1]), "r"(v[2]),
               "r"(v[3])
               : "memory");
}
DEVICE void load_matrix4(u32 a, u32& v0, u32& v1, u32& v2, u32& v3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v0), "=r"(v1), "=r"(v2), "=r"(v3)
               : "r"(a)
               : "memory");
}
DEVICE void store_matrix4(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v0),
               "r"(v1), "r"(v2), "r"(v3)
               : "memory");
}
// The lane id, through a shuffle so that it stays in a register: reading it again is slow.
DEVICE int lane_id() {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(~0u, lane, lane);
}

// One thread of the warp, all of which must be here.
DEVICE bool elected() {
  u32 one;
  asm volatile(
      "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(one));
  return one != 0;
}
// Has a value stay in its register: it is not computed anew where it is used.
DEVICE void keep(u32& v) { asm volatile("" : "+r"(v)); }

DEVICE int load_global(const int* p) {
  int v;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
DEVICE u32 load_global_byte(const u8* p) {
  u32 v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
DEVICE void load_global2(const u8* p, u32* v) {
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p));
}
DEVICE void load_global4(const u8* p, u32* v) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(p));
}

// ---- thread-block clusters
DEVICE u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE u32 map_to_rank(u32 a, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
  return r;
}
DEVICE void store_remote4(u32 a, float x, float y, float z, float w) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}
DEVICE void store_remote2(u32 a, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
// Every thread of the cluster passes here. Orders no stores: for memory whose reads have returned,
// and whose stores the other threads of their CTA have seen. PTX promises less, for it counts no read
// as done before a release.
DEVICE void cluster_meet() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// ---- arithmetic
#define kInfinity __int_as_float(0x7f800000)
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEVICE u32 mul_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 pack_e4m3(float x0, float x1, float x2, float x3) {
  u32 r;
  asm("{\n.reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n}"
      : "=r"(r)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return r;
}
// float32 values of two e4m3 codes
DEVICE void unpack_e4m3x2(u32 codes, float& x, float& y) {
  asm("{\n.reg .b16 c, l, h;\n.reg .b32 t;\ncvt.u16.u32 c, %2;\ncvt.rn.f16x2.e4m3x2 t, c;\n"
      "mov.b32 {l, h}, t;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(x), "=f"(y)
      : "r"(codes));
}

// Of loads and copies that are made once, or by a few CTAs at a time: they leave L2 first.
DEVICE u64 once_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
