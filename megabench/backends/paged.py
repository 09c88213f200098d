"""Reading and writing rows of a paged cache with torch indexing, any record, layout and stride."""

from __future__ import annotations

import torch

from megabench.formats import (
    FP8,
    HEAD_DIM,
    NOPE_DIM,
    NVFP4,
    KVRecord,
    PageLayout,
    page_offsets,
    record_of,
)
from megabench.quant import (
    decode_e4m3,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_kv_mxfp8,
    quantize_nvfp4,
    ue8m0_to_float,
)


def _page_views(cache: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [blocks, page, data_bytes] and [blocks, page, scale_bytes] into a cache's pages."""
    record = record_of(cache.shape[-1])
    blocks, page = cache.shape[:2]
    data_base, data_pitch, scale_base, scale_pitch = page_offsets(record, layout, page)
    raw, stride, start = cache.view(torch.uint8), cache.stride(0), cache.storage_offset()
    data = raw.as_strided(
        (blocks, page, record.data_bytes), (stride, data_pitch, 1), start + data_base
    )
    scale = raw.as_strided(
        (blocks, page, record.scale_bytes), (stride, scale_pitch, 1), start + scale_base
    )
    return data, scale


def _dequantize(record: KVRecord, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if record is FP8:
        return dequantize_mxfp8(data, scale)
    if record is NVFP4:
        return dequantize_nvfp4(data, scale)
    nope = torch.unflatten(decode_e4m3(data[..., :NOPE_DIM].contiguous()), -1, (-1, record.group))
    nope = (nope * ue8m0_to_float(scale[..., :7]).unsqueeze(-1)).flatten(-2)
    rope = data[..., NOPE_DIM:].contiguous().view(torch.bfloat16).to(torch.float32)
    return torch.cat((nope, rope), -1)


def read_rows(cache: torch.Tensor, slots: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Dequantized float32 rows [..., 512] of slot ids int64 [...] inside the pool (exact in bf16).

    cache [blocks, page, (1,) bytes] with any page stride.
    """
    page = cache.shape[1]
    data, scale = _page_views(cache, layout)
    block, offset = slots // page, slots % page
    return _dequantize(record_of(cache.shape[-1]), data[block, offset], scale[block, offset])


def read_valid_rows(
    cache: torch.Tensor, slots: torch.Tensor, valid: torch.Tensor, layout: PageLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `slots`, zeros where not `valid` or outside the pool, and the resulting mask.

    Zeros, not a masked score alone: a NaN byte times a probability of zero is still NaN.
    """
    slots = slots.to(torch.int64)
    valid = valid & (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    if cache.shape[0] == 0:
        return torch.zeros((*slots.shape, HEAD_DIM), device=cache.device), valid
    rows = read_rows(cache, torch.where(valid, slots, 0), layout)
    return torch.where(valid.unsqueeze(-1), rows, 0.0), valid


def write_rows(
    cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, layout: PageLayout
) -> None:
    """Quantize float32 rows [n, 512] into slots int64 [n]; a slot < 0 writes nothing.

    Free of host syncs: a skipped row repeats the first written one, byte for byte; when there is
    none, slot 0 is rewritten with what it holds.
    """
    if rows.shape[0] == 0 or cache.shape[0] == 0:
        return
    page = cache.shape[1]
    encode = quantize_kv_mxfp8 if record_of(cache.shape[-1]) is FP8 else quantize_nvfp4
    written = slots >= 0
    source = torch.where(
        written, torch.arange(len(slots), device=slots.device), written.int().argmax()
    )
    target = slots[source].clamp_min(0)
    block, offset = target // page, target % page
    for view, fresh in zip(_page_views(cache, layout), encode(rows), strict=True):
        view[block, offset] = torch.where(written.any(), fresh[source], view[block, offset])


def read_records(cache: torch.Tensor, slots: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Raw records uint8 [..., nbytes] (data, then scales) of slot ids int64 [...] in the pool."""
    page = cache.shape[1]
    parts = [view[slots // page, slots % page] for view in _page_views(cache, layout)]
    return torch.cat(parts, -1)


def write_records(
    cache: torch.Tensor, slots: torch.Tensor, records: torch.Tensor, layout: PageLayout
) -> None:
    """Put raw records uint8 [n, nbytes] into distinct slots int64 [n] of the pool."""
    page = cache.shape[1]
    sizes = [view.shape[-1] for view in _page_views(cache, layout)]
    for view, part in zip(_page_views(cache, layout), torch.split(records, sizes, -1), strict=True):
        view[slots // page, slots % page] = part
