"""FlashMLA's older 584-byte V4 records of the same values as our caches hold.

A V4 record has one ue8m0 scale for 64 of its 448 e4m3 dims and bf16 RoPE dims. It holds a random
fp8 row exactly, whose scales lie within a few binades, and an NVFP4 row whose scales are powers of
two.
`representable` gives a workload of such rows, and `to_v4` re-encodes them, or refuses.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megabench.backends.paged import read_rows
from megabench.formats import HEAD_DIM, NOPE_DIM, NVFP4, V4_FP8, PageLayout
from megabench.hashing import Stream
from megabench.quant import AMAX_FLOOR, E4M3_MAX, UE8M0_BIAS, decode_e2m1, decode_e4m3, encode_e4m3
from megabench.workload import Workload

ROWS_AT_A_TIME = 1 << 16
LARGEST_E2M1 = 6.0


def representable(workload: Workload) -> Workload:
    """The workload with NVFP4 scales (changed in place) and new rows that V4 records can follow."""
    latent = None
    if workload.compressed_cache is not None:
        if workload.case.record is NVFP4:
            round_scales_(workload.compressed_cache)
        latent = grid_rows("latent", workload.kv.shape[0], workload.device)
    kv = grid_rows("kv", workload.kv.shape[0], workload.device)
    return replace(workload, kv=kv, latent=latent)


def round_scales_(cache: torch.Tensor) -> None:
    """Make the e4m3 scales of NoPE dims 1/8, 1/4, 1/2 or 1, in place, so that e2m1 times scale is
    an e4m3 value: uint8 [blocks, page, 288], interleaved. RoPE dims are bf16 in V4 and stay."""
    nope = cache[..., NVFP4.data_bytes : NVFP4.data_bytes + NOPE_DIM // NVFP4.group]
    nope.copy_(0x20 | (nope & 3) << 3)


def grid_rows(label: str, rows: int, device: torch.device) -> torch.Tensor:
    """bf16 [rows, 512] of e2m1 values, the largest in each 16: exact in every record but for what
    RoPE makes of the last 64 dims."""
    pairs = Stream.of("peers", label).bytes(rows, HEAD_DIM // 2, device=device)
    values = decode_e2m1(pairs)
    values[:, :: NVFP4.group] = LARGEST_E2M1
    return values.to(torch.bfloat16)


def to_v4(cache: torch.Tensor, layout: PageLayout = "interleaved") -> torch.Tensor:
    """uint8 [blocks, page, 1, 584] of a cache [blocks, page, (1,) 528 or 288], slot for slot.

    A page is all data (448 e4m3, 64 bf16 a row), then all scales. Rows that hold a NaN, which no
    index may name, become 0xFF bytes. ValueError for a row whose values would change.
    """
    blocks, page = cache.shape[:2]
    flat = torch.zeros((blocks, page * V4_FP8.nbytes), dtype=torch.uint8, device=cache.device)
    split = page * V4_FP8.data_bytes
    data = flat[:, :split].view(blocks, page, V4_FP8.data_bytes)
    scales = flat[:, split:].view(blocks, page, V4_FP8.scale_bytes)
    slots = torch.arange(blocks * page, device=cache.device)
    for some in torch.split(slots, ROWS_AT_A_TIME):
        rows = read_rows(cache, some, layout)
        at = some // page, some % page
        data[at], scales[at] = encode_v4(rows)
    return flat.view(blocks, page, 1, V4_FP8.nbytes)


def encode_v4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Data bytes uint8 [n, 576] and scale bytes uint8 [n, 8] of float32 rows [n, 512]."""
    named = rows.isfinite().all(-1, keepdim=True)
    rows = torch.where(named, rows, 0.0)
    blocks = torch.unflatten(rows[:, :NOPE_DIM], -1, (-1, V4_FP8.group))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    codes = encode_e4m3(torch.ldexp(blocks, -exponent))
    rotary = rows[:, NOPE_DIM:].to(torch.bfloat16).contiguous()
    exact = torch.equal(torch.ldexp(decode_e4m3(codes), exponent), blocks)
    if not (exact and torch.equal(rotary.to(torch.float32), rows[:, NOPE_DIM:])):
        raise ValueError("rows: some hold values that a V4 record cannot")
    data = torch.cat((codes.flatten(1), rotary.view(torch.uint8)), -1)
    scales = torch.zeros((len(rows), V4_FP8.scale_bytes), dtype=torch.uint8, device=rows.device)
    scales[:, :-1] = (exponent.squeeze(-1) + UE8M0_BIAS).to(torch.uint8)
    return torch.where(named, data, 0xFF), torch.where(named, scales, 0xFF)
