// Rings of shared-memory stages, and copies that announce themselves on a stage's barrier.
#pragma once

#include "ptx.cuh"

// A slot of a ring and the parity of its use.
template <int Slots> struct Ring {
  u32 slot = 0, parity = 0;

  DEVICE void advance(int steps = 1) {
    for (int i = 0; i < steps; i++)
      if (++slot == Slots) slot = 0, parity ^= 1;
  }
};

// The same as a stage's address, for rings whose stages hold their barriers: one register finds it all.
// `Begin` is the ring's offset in shared memory, `Bytes` a stage's length.
template <u32 Begin, int Stages, u32 Bytes> struct Place {
  u32 at, parity = 0, begin;
  DEVICE explicit Place(u32 smem) : at(smem + Begin), begin(at) {}
  DEVICE void advance() {
    at += Bytes;
    if (at == begin + Stages * Bytes) at = begin, parity ^= 1;
  }
};

// Counts this thread's earlier copies on `bar` when they have landed.
DEVICE void arrive_after_copies(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// 4 bytes; `bytes` 0 writes zeros and reads nothing.
DEVICE void copy4(u32 dst, const void* src, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
