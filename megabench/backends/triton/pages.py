"""How a paged cache is addressed, as kernel arguments and as a kernel helper."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megabench.formats import V4_FP8, KVRecord, PageLayout, page_offsets, record_of


@dataclass(frozen=True)
class Pages:
    """A cache [blocks, page, (1,) bytes] whose page stride may exceed page * record."""

    record: KVRecord
    slots: int
    addressing: tuple[int, int, int, int, int]
    """page stride, page size, data pitch, scale base, scale pitch; in bytes but for the size."""


def pages_of(cache: torch.Tensor, layout: PageLayout) -> Pages:
    """Read a cache's addressing; ValueError for a V4 record, which these kernels do not read."""
    record = record_of(cache.shape[-1])
    if record is V4_FP8:
        raise ValueError(f"cache: the triton backend reads no {record.name} records")
    page_size = cache.shape[1]
    _, data_pitch, scale_base, scale_pitch = page_offsets(record, layout, page_size)
    addressing = (cache.stride(0), page_size, data_pitch, scale_base, scale_pitch)
    return Pages(record, cache.shape[0] * page_size, addressing)


@triton.jit
def row_offsets(slot, page_stride, page_size, data_pitch, scale_base, scale_pitch):
    """Byte offsets (int64) of the data and the scales of int32 slots."""
    page = (slot // page_size).to(tl.int64) * page_stride
    row = slot % page_size
    return page + row * data_pitch, page + scale_base + row * scale_pitch


@triton.jit
def slots_of(index_ptr, first, end, pool, N: tl.constexpr):
    """Slots of entries first..first+N of an index row, 0 where not valid, and which are valid."""
    entry = first + tl.arange(0, N)
    slot = tl.load(index_ptr + entry, mask=entry < end, other=-1)
    valid = (slot >= 0) & (slot < pool)
    return tl.where(valid, slot, 0), valid
