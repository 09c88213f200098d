"""KV cache records and page layouts.

A record holds 512 dims of one token. Reading it gives a *code* for each dim and a *scale byte* for
each group of dims; what those mean follows from the record type, which follows from the record's
width. Page layouts place the same bytes differently: "interleaved" puts a token's scales after its
own data, "page_split" puts all data of a page first, then all scales. ``cache`` is uint8
``[blocks, page, bytes]`` or ``[blocks, page, 1, bytes]``; only ``stride(0)`` is free, and pages may
be padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import quantize
from .codes import as_bytes, decode_e2m1, decode_e4m3, decode_ue8m0

HEAD_DIM = 512
V4_NOPE = 448
LAYOUTS = ("interleaved", "page_split")


@dataclass(frozen=True)
class Record:
    """One record type: widths in bytes; ``groups`` scales of ``group`` dims each.

    The rest is padding.
    """

    nbytes: int
    data: int
    groups: int
    group: int


RECORDS = {
    528: Record(528, data=512, groups=16, group=32),
    288: Record(288, data=256, groups=32, group=16),
    584: Record(584, data=576, groups=7, group=64),
}
"""By width: V4.1 fp8 (e4m3, ue8m0), V4.1 NVFP4 (e2m1, e4m3), V4 fp8 (448 e4m3 + 64 bf16, ue8m0)."""


def record_of(nbytes: int) -> Record:
    """The record type of a width; ValueError for an unknown one."""
    if nbytes not in RECORDS:
        raise ValueError(f"no record of {nbytes} bytes; known: {sorted(RECORDS)}")
    return RECORDS[nbytes]


def unpack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[..., nbytes]`` -> codes int32 ``[..., 512]``, scales uint8 ``[..., groups]``.

    A code is an e4m3 byte, an e2m1 nibble (even element in the low one), or, for the RoPE dims of
    the 584-byte record, a bf16 bit pattern.
    """
    record = record_of(rows.shape[-1])
    data = rows[..., : record.data].int()
    scales = rows[..., record.data : record.data + record.groups]
    if record.nbytes == 288:
        data = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    elif record.nbytes == 584:
        rope = data[..., V4_NOPE::2] | (data[..., V4_NOPE + 1 :: 2] << 8)
        data = torch.cat([data[..., :V4_NOPE], rope], dim=-1)
    return data, scales


def pack(codes: Tensor, scales: Tensor, nbytes: int) -> Tensor:
    """Inverse of :func:`unpack`; padding bytes are zero."""
    record = record_of(nbytes)
    codes = codes.int()
    if nbytes == 288:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    elif nbytes == 584:
        rope = codes[..., V4_NOPE:]
        rope = torch.stack([rope & 255, (rope >> 8) & 255], dim=-1).flatten(-2)
        codes = torch.cat([codes[..., :V4_NOPE], rope], dim=-1)
    padding = scales.new_zeros((*scales.shape[:-1], nbytes - record.data - record.groups))
    return torch.cat([codes.to(torch.uint8), as_bytes(scales), padding], dim=-1)


def decode_rows(rows: Tensor) -> Tensor:
    """Record bytes uint8 ``[..., nbytes]`` -> fp32 ``[..., 512]``, exact (and exact in bf16)."""
    record = record_of(rows.shape[-1])
    codes, scales = unpack(rows)
    if record.nbytes == 288:
        values, scale = decode_e2m1(codes), decode_e4m3(scales)
    else:
        values, scale = (
            decode_e4m3(codes[..., : record.groups * record.group]),
            decode_ue8m0(scales),
        )
    grouped = torch.unflatten(values, -1, (record.groups, record.group))
    values = grouped.mul_(scale.unsqueeze(-1)).flatten(-2)
    if record.nbytes == 584:
        return torch.cat([values, (codes[..., V4_NOPE:] << 16).view(torch.float32)], dim=-1)
    return values


def scales_for(amax: Tensor, nbytes: int) -> Tensor:
    """Scale bytes that a group's amax asks for: ``[..., groups]`` -> uint8 ``[..., groups]``."""
    return quantize.nvfp4_scale(amax) if nbytes == 288 else quantize.scale_exponent(amax)


def codes_under(rows: Tensor, scales: Tensor, nbytes: int) -> Tensor:
    """Codes of fp32 rows ``[..., 512]`` under given scale bytes, int32 ``[.

    512]`` as in unpack.
    """
    record = record_of(nbytes)
    if nbytes == 288:
        return quantize.nvfp4_codes(rows, scales).int()
    quantized = record.groups * record.group
    codes = quantize.mxfp8_codes(rows[..., :quantized], scales, record.group).int()
    if nbytes == 584:
        bits = rows[..., V4_NOPE:].bfloat16().view(torch.int16).int() & 0xFFFF
        codes = torch.cat([codes, bits], dim=-1)
    return codes


def group_amax(rows: Tensor, nbytes: int) -> Tensor:
    """max |row| over each scaled group: ``[..., 512]`` -> ``[..., groups]``."""
    record = record_of(nbytes)
    return quantize.block_amax(rows[..., : record.groups * record.group], record.group)


def encode_rows(rows: Tensor, nbytes: int) -> Tensor:
    """Rows fp32 ``[..., 512]``, RoPE'd already -> record bytes uint8 ``[..., nbytes]``."""
    scales = scales_for(group_amax(rows, nbytes), nbytes)
    return pack(codes_under(rows, scales, nbytes), scales, nbytes)


def _page_views(cache: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Data ``[blocks, page, data]`` and scale ``[blocks, page, rest]`` views of a cache's bytes."""
    if layout not in LAYOUTS:
        raise ValueError(f"page layout must be one of {LAYOUTS}, got {layout!r}")
    cache = as_bytes(cache)
    blocks, page, nbytes = cache.shape[0], cache.shape[1], cache.shape[-1]
    data = record_of(nbytes).data
    if page > 1 and cache.stride(1) != nbytes:
        raise ValueError(f"a page's records must be contiguous, got strides {cache.stride()}")
    start, step = cache.storage_offset(), cache.stride(0)
    if layout == "interleaved":
        whole = cache.as_strided((blocks, page, nbytes), (step, nbytes, 1), start)
        return whole[..., :data], whole[..., data:]
    tail = nbytes - data
    return (
        cache.as_strided((blocks, page, data), (step, data, 1), start),
        cache.as_strided((blocks, page, tail), (step, tail, 1), start + page * data),
    )


def _block_and_offset(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    slots = slots.long()
    if slots.numel() and (
        int(slots.min()) < 0 or int(slots.max()) >= cache.shape[0] * cache.shape[1]
    ):
        raise ValueError(f"slots must lie in [0, {cache.shape[0] * cache.shape[1]})")
    return slots // cache.shape[1], slots % cache.shape[1]


def read_record(cache: Tensor, slots: Tensor, layout: str = "interleaved") -> Tensor:
    """Bytes of the records in ``slots [...]`` -> uint8 ``[..., nbytes]``, data then scales.

    ValueError for a slot outside the pool: a negative one must never mean "the last row".
    """
    data, scales = _page_views(cache, layout)
    where = _block_and_offset(cache, slots)
    return torch.cat([data[where], scales[where]], dim=-1)


def write_record(cache: Tensor, slots: Tensor, rows: Tensor, layout: str = "interleaved") -> None:
    """Write records uint8 ``[n, nbytes]`` into ``slots [n]`` in place; slots < 0 write nothing."""
    named = slots >= 0
    data, scales = _page_views(cache, layout)
    where = _block_and_offset(cache, slots[named])
    split = record_of(cache.shape[-1]).data
    data[where], scales[where] = rows[named][:, :split], rows[named][:, split:]


def decode_slots(cache: Tensor, slots: Tensor, layout: str = "interleaved") -> Tensor:
    """Rows held by ``slots [...]`` of a cache -> fp32 ``[..., 512]``.

    Slots outside the pool are refused.
    """
    return decode_rows(read_record(cache, slots, layout))
