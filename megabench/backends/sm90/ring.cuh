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

// Counts this thread's earlier copies on `bar` when they have landed.
DEVICE void arrive_after_copies(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// 4 bytes; `bytes` 0 writes zeros and reads nothing.
DEVICE void copy4(u32 dst, const void* src, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
