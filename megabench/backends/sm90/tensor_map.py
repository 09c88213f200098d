"""Describes tensors of bytes to the copy engine, which then copies boxes of them."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from megabench.backends.sm90.nvrtc import bindings, check

TensorMap = ctypes.c_uint64 * 16


def box_map(t: torch.Tensor, box: tuple[int, int, int]) -> ctypes.Array[ctypes.c_uint64]:
    """The map of `t` [a, b, c], one byte an element, in boxes [a, b, c] of rows of 128 bytes, which
    come in the 128-byte swizzle; outside of `t` a box is zeros. `t` starts at a multiple of 16
    bytes, its rows are dense, and so far apart."""
    steps = tuple(t.stride(i) if t.shape[i] > 1 else t.shape[2] for i in (0, 1))
    return _encoded(t.data_ptr(), tuple(t.shape), steps, box)


@lru_cache(maxsize=1024)
def _encoded(
    address: int, shape: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...]
) -> ctypes.Array[ctypes.c_uint64]:
    driver, _ = bindings()
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        3,
        address,
        [wide(n) for n in reversed(shape)],
        [wide(n) for n in reversed(steps)],
        [narrow(n) for n in reversed(box)],
        [narrow(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    encoded = check(made, "describing a tensor to the copy engine")
    return TensorMap.from_buffer_copy(ctypes.string_at(encoded.getPtr(), ctypes.sizeof(TensorMap)))
