"""Cache writes: pad Q and insert the SWA row in one launch; insert closed compressed rows."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from megabench.backends.triton.bits import (
    e4m3_to_f32,
    f32_to_e2m1,
    f32_to_e4m3,
    inverse_ue8m0,
    kv_scale_byte,
)
from megabench.backends.triton.pages import pages_of
from megabench.backends.triton.rope import rope_latent
from megabench.backends.triton.target import target_of
from megabench.formats import HEAD_DIM, NVFP4, Q_CHUNK, PageLayout

Q_CHUNKS_PER_PROGRAM = 8
"""Of 32: four programs pad one token's Q beside the one that writes its row."""
INSERT_WARPS = 4


@triton.jit
def _store_mxfp8(row, data_ptr, scale_ptr, FP8_CVT: tl.constexpr):
    """Quantize and write a float32 row [512] as 512 e4m3 codes and 16 ue8m0 bytes."""
    blocks = tl.reshape(row, (16, 32))
    byte = kv_scale_byte(tl.max(tl.abs(blocks), axis=1))
    code = f32_to_e4m3(blocks * inverse_ue8m0(byte)[:, None], FP8_CVT)
    group = tl.arange(0, 16)
    tl.store(data_ptr + group[:, None] * 32 + tl.arange(0, 32)[None, :], code)
    tl.store(scale_ptr + group, byte.to(tl.uint8))


@triton.jit
def _store_nvfp4(row, data_ptr, scale_ptr, FP8_CVT: tl.constexpr):
    """Quantize and write a float32 row [512] as 256 nibble pairs and 32 e4m3 scales."""
    blocks = tl.reshape(row, (32, 16))
    amax = tl.max(tl.abs(blocks), axis=1)
    scale = f32_to_e4m3(tl.minimum(tl.maximum(amax * (1.0 / 6.0), 2.0**-9), 448.0), FP8_CVT)
    quotient = tl.div_rn(blocks, tl.broadcast_to(e4m3_to_f32(scale)[:, None], (32, 16)))
    low, high = tl.split(tl.reshape(f32_to_e2m1(quotient), (32, 8, 2)))
    group = tl.arange(0, 32)
    pairs = (low | (high << 4)).to(tl.uint8)
    tl.store(data_ptr + group[:, None] * 8 + tl.arange(0, 8)[None, :], pairs)
    tl.store(scale_ptr + group, scale)


@triton.jit
def _insert_row(
    x_ptr,
    position,
    cos_sin_ptr,
    cache_ptr,
    slot,
    page_stride,
    page_size,
    data_pitch,
    scale_base,
    scale_pitch,
    FP4: tl.constexpr,
    EMULATE: tl.constexpr,
    FP8_CVT: tl.constexpr,
):
    row = rope_latent(x_ptr, cos_sin_ptr, position, EMULATE)
    page = cache_ptr + (slot // page_size) * page_stride
    data_ptr = page + (slot % page_size) * data_pitch
    scale_ptr = page + scale_base + (slot % page_size) * scale_pitch
    if FP4:
        _store_nvfp4(row, data_ptr, scale_ptr, FP8_CVT)
    else:
        _store_mxfp8(row, data_ptr, scale_ptr, FP8_CVT)


@triton.jit
def _pad_q(q_ptr, padded_ptr, token, first_chunk, H, PADDED: tl.constexpr, CHUNKS: tl.constexpr):
    chunk = first_chunk + tl.arange(0, CHUNKS)[:, None, None]
    head = tl.arange(0, PADDED)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    q = tl.load(q_ptr + token * H * 512 + (chunk * H + head) * 16 + j, mask=head < H, other=0.0)
    tl.store(padded_ptr + token * PADDED * 512 + (chunk * PADDED + head) * 16 + j, q)


@triton.jit
def pad_q_and_insert_kv_kernel(
    q_ptr,
    padded_ptr,
    kv_ptr,
    kv_stride,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    cache_ptr,
    slots,
    page_stride,
    page_size,
    data_pitch,
    scale_base,
    scale_pitch,
    H,
    PADDED: tl.constexpr,
    CHUNKS: tl.constexpr,
    EMULATE: tl.constexpr,
    FP8_CVT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part == 0:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        if (slot >= 0) & (slot < slots):
            _insert_row(
                kv_ptr + token * kv_stride,
                tl.load(position_ptr + token).to(tl.int64),
                cos_sin_ptr,
                cache_ptr,
                slot,
                page_stride,
                page_size,
                data_pitch,
                scale_base,
                scale_pitch,
                False,
                EMULATE,
                FP8_CVT,
            )
    else:
        _pad_q(q_ptr, padded_ptr, token, (part - 1) * CHUNKS, H, PADDED, CHUNKS)


@triton.jit
def insert_compressed_kernel(
    latent_ptr,
    latent_stride,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    cache_ptr,
    slots,
    page_stride,
    page_size,
    data_pitch,
    scale_base,
    scale_pitch,
    ratio,
    FP4: tl.constexpr,
    EMULATE: tl.constexpr,
    FP8_CVT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    position = tl.load(position_ptr + token).to(tl.int64)
    if ((position + 1) % ratio == 0) & (slot >= 0) & (slot < slots):
        _insert_row(
            latent_ptr + token * latent_stride,
            position // ratio * ratio,
            cos_sin_ptr,
            cache_ptr,
            slot,
            page_stride,
            page_size,
            data_pitch,
            scale_base,
            scale_pitch,
            FP4,
            EMULATE,
            FP8_CVT,
        )


def pad_q_and_insert_kv(
    q: torch.Tensor,
    kv: torch.Tensor,
    swa_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    padded_heads: int,
    layout: PageLayout,
) -> torch.Tensor:
    """Pad Q inside every chunk and write this step's SWA rows, in one launch.

    Returns [T, padded_heads, 512]; q itself when it already has padded_heads heads.
    """
    tokens, heads, _ = q.shape
    pages = pages_of(swa_cache, layout)
    padding = heads != padded_heads
    padded = q.new_empty((tokens, padded_heads, HEAD_DIM)) if padding else q
    if tokens == 0:
        return padded
    target = target_of(q.device)
    parts = HEAD_DIM // Q_CHUNK // Q_CHUNKS_PER_PROGRAM if padding else 0
    pad_q_and_insert_kv_kernel[(tokens, 1 + parts)](
        q.contiguous(),
        padded,
        kv,
        kv.stride(0),
        slot_mapping,
        positions,
        cos_sin_cache,
        swa_cache.view(torch.uint8),
        pages.slots,
        *pages.addressing,
        heads,
        PADDED=padded_heads,
        CHUNKS=Q_CHUNKS_PER_PROGRAM,
        EMULATE=target.emulate,
        FP8_CVT=target.fp8_cvt,
        num_warps=INSERT_WARPS,
    )
    return padded


def insert_compressed(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
    layout: PageLayout,
) -> None:
    """Write the compressed rows that close in this step, in the cache's own record."""
    pages = pages_of(cache, layout)
    if latent.shape[0] == 0:
        return
    target = target_of(latent.device)
    insert_compressed_kernel[(latent.shape[0],)](
        latent,
        latent.stride(0),
        slot_mapping,
        positions,
        cos_sin_cache,
        cache.view(torch.uint8),
        pages.slots,
        *pages.addressing,
        compress_ratio,
        FP4=pages.record is NVFP4,
        EMULATE=target.emulate,
        FP8_CVT=target.fp8_cvt,
        num_warps=1,
    )
