"""Number formats on integer bits, against torch over wide bit patterns."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from megabench.backends.triton import bits, tiles
from megabench.backends.triton.target import target_of
from megabench.quant import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    quantize_activation,
    quantize_kv_mxfp8,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGET = target_of(torch.device(DEVICE))
BLOCK = 1 << 14


def float32_patterns(count: int = 1 << 18) -> torch.Tensor:
    """Finite float32 of every exponent, and every neighbour of a tie in the e4m3 range."""
    g = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31 - 1, (count,), generator=g).to(torch.int32)
    values = random.view(torch.float32)
    grid = decode_e4m3(torch.arange(127, dtype=torch.uint8))
    ties = ((grid[:-1] + grid[1:]) / 2).view(torch.int32)
    near = torch.cat([ties + step for step in (-1, 0, 1)]).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, 448.0, 464.0, 1e30, -1e30, 2.0**-10, 2.0**-9, 2.0**-6])
    values = torch.cat((values[values.isfinite()], near, -near, edges))
    return torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).to(DEVICE)


@triton.jit
def _e4m3_kernel(x_ptr, out_ptr, FP8_CVT: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, bits.f32_to_e4m3(tl.load(x_ptr + i), FP8_CVT))


@pytest.mark.parametrize("fp8_cvt", sorted({False, TARGET.fp8_cvt}))
def test_e4m3_codes_equal_torchs_for_every_kind_of_float32(fp8_cvt: bool) -> None:
    x = float32_patterns()
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    _e4m3_kernel[(len(x) // BLOCK,)](x, out, FP8_CVT=fp8_cvt, N=BLOCK)
    assert torch.equal(out, encode_e4m3(x))


@triton.jit
def _bf16_kernel(x_ptr, out_ptr, wide_ptr, EMULATE: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    rounded = bits.f32_to_bf16(tl.load(x_ptr + i), EMULATE)
    tl.store(out_ptr + i, rounded)
    tl.store(wide_ptr + i, bits.bf16_to_f32(rounded, EMULATE))


def test_bf16_rounds_to_nearest_even_and_widens_exactly() -> None:
    x = float32_patterns()
    out = torch.empty(len(x), dtype=torch.bfloat16, device=DEVICE)
    wide = torch.empty_like(x)
    _bf16_kernel[(len(x) // BLOCK,)](x, out, wide, EMULATE=TARGET.emulate, N=BLOCK)
    assert torch.equal(out.view(torch.int16), x.bfloat16().view(torch.int16))
    assert torch.equal(wide.view(torch.int32), x.bfloat16().float().view(torch.int32))


@triton.jit
def _e2m1_kernel(x_ptr, out_ptr, back_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    code = bits.f32_to_e2m1(tl.load(x_ptr + i))
    tl.store(out_ptr + i, code.to(tl.uint8))
    tl.store(back_ptr + i, bits.e2m1_to_f32(code))


def test_e2m1_codes_take_ties_to_even_and_decode_back() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0])
    near = torch.cat([(ties.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)])
    x = torch.cat((near[near.isfinite()], -ties, torch.linspace(-9, 9, 3000)))
    x = torch.nn.functional.pad(x, (0, -len(x) % 4096)).to(DEVICE)
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    back = torch.empty_like(x)
    _e2m1_kernel[(1,)](x, out, back, N=len(x))
    assert torch.equal(out, encode_e2m1(x))
    assert torch.equal(back, decode_e2m1(out)[..., ::2])


@triton.jit
def _scale_kernel(amax_ptr, kv_ptr, activation_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    amax = tl.load(amax_ptr + i)
    tl.store(kv_ptr + i, bits.kv_scale_byte(amax).to(tl.uint8))
    tl.store(activation_ptr + i, bits.activation_scale_byte(amax).to(tl.uint8))


def test_scale_bytes_step_exactly_at_powers_of_two_times_448() -> None:
    edges = torch.tensor([math.ldexp(m, e) for m in (1.0, 1.75, 1.5) for e in range(-100, 100)])
    steps = [(edges.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)]
    amax = torch.cat((*steps, torch.tensor([0.0, 1e-4, 9.9e-5, 1e-30])))
    amax = torch.nn.functional.pad(amax, (0, 2048 - len(amax)), value=1.0).to(DEVICE)
    kv, activation = (torch.empty(2048, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    _scale_kernel[(1,)](amax, kv, activation, N=2048)
    rows = torch.zeros(2048, 32, device=DEVICE)
    rows[:, 7] = -amax
    assert torch.equal(kv, quantize_kv_mxfp8(rows)[1].flatten())
    assert torch.equal(activation, quantize_activation(rows)[1].flatten())


@triton.jit
def _record_kernel(
    cache_ptr,
    out_ptr,
    FP4: tl.constexpr,
    BYTES: tl.constexpr,
    DATA: tl.constexpr,
    EMULATE: tl.constexpr,
):
    row = tl.arange(0, 64)
    valid = row % 3 != 0
    data = row.to(tl.int64) * BYTES
    if FP4:
        k = tiles.nvfp4_tile(cache_ptr, data, data + DATA, valid, 64, EMULATE)
    else:
        k = tiles.mxfp8_tile(cache_ptr, data, data + DATA, valid, 64, EMULATE)
    tl.store(out_ptr + row[:, None] * 512 + tl.arange(0, 512)[None, :], k.to(tl.float32))


@pytest.mark.parametrize("nbytes", [528, 288])
def test_a_tile_is_the_records_exact_values_and_zero_where_not_valid(nbytes: int) -> None:
    data, groups = (512, 16) if nbytes == 528 else (256, 32)
    g = torch.Generator().manual_seed(1)
    cache = torch.randint(0, 256, (64, nbytes), generator=g).to(torch.uint8)
    valid = torch.arange(64) % 3 != 0
    if nbytes == 528:
        codes = torch.randint(0, 127, (64, data), generator=g) | (cache[:, :data] & 0x80).long()
        cache[:, :data] = torch.where(valid[:, None], codes.to(torch.uint8), 0xFF)
        scales = torch.randint(20, 240, (64, groups), generator=g).to(torch.uint8)
    else:
        scales = torch.randint(1, 127, (64, groups), generator=g).to(torch.uint8)
    cache[:, data:] = torch.where(valid[:, None], scales, 0xFF)
    if nbytes == 528:
        want = decode_e4m3(cache[:, :data]).double() * torch.ldexp(
            torch.ones(()).double(), cache[:, data:].double() - 127
        ).repeat_interleave(32, -1)
    else:
        want = decode_e2m1(cache[:, :data]) * decode_e4m3(cache[:, data:]).repeat_interleave(16, -1)
    want = torch.where(valid[:, None], want.double(), 0.0)
    out = torch.empty(64, 512, device=DEVICE)
    _record_kernel[(1,)](
        cache.to(DEVICE), out, FP4=nbytes == 288, BYTES=nbytes, DATA=data, EMULATE=TARGET.emulate
    )
    assert torch.equal(out.double().cpu(), want)
