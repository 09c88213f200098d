// A slot of a ring of shared-memory stages, and the parity of its use.
#pragma once

#include "ptx.cuh"

template <int Slots> struct Ring {
  u32 slot = 0, parity = 0;

  DEVICE void advance(int steps = 1) {
    for (int i = 0; i < steps; i++)
      if (++slot == Slots) slot = 0, parity ^= 1;
  }
};
