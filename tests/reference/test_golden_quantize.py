"""Block quantizers against exact rational arithmetic and exhaustive search."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import codes, quantize


def ceil_log2_over_448(amax: float) -> int:
    """Smallest e with amax <= 448 · 2^e, by exact comparison."""
    ratio = Fraction(amax) / 448
    e = -400
    while Fraction(2) ** e < ratio:
        e += 1
    return e


def edges(dtype: torch.dtype) -> Tensor:
    """448 · 2^k and powers of two, with both neighbours."""
    k = torch.arange(-21, 100)
    centre = torch.cat([448 * torch.exp2(k.double()), torch.exp2(k.double())]).to(dtype)
    zero, top = torch.tensor(0.0, dtype=dtype), torch.tensor(math.inf, dtype=dtype)
    return torch.cat([centre, torch.nextafter(centre, zero), torch.nextafter(centre, top)])


def random_blocks(seed: int, rows: int = 8, width: int = 512, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    return x * torch.exp(spread * torch.randn(rows, width, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_byte_is_exact_at_and_beside_every_edge(dtype: torch.dtype) -> None:
    amax = edges(dtype)
    amax = amax[amax >= 1e-4]
    expected = [ceil_log2_over_448(a) + 127 for a in amax.tolist()]
    assert quantize.scale_exponent(amax).tolist() == expected


def test_an_exact_multiple_of_448_does_not_round_its_exponent_up() -> None:
    up = torch.nextafter(torch.tensor(448.0), torch.tensor(math.inf))
    assert quantize.scale_exponent(torch.tensor([448.0, up.item(), 896.0])).tolist() == [
        127,
        128,
        128,
    ]


def test_amax_is_floored_so_that_a_zero_block_has_byte_105() -> None:
    code, scale = quantize.kv_mxfp8(torch.zeros(2, 64))
    assert (code == 0).all()
    assert (scale == 105).all()
    assert quantize.scale_exponent(torch.tensor([1e-30])).item() == 105


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31))
def test_kv_scale_is_the_smallest_that_does_not_saturate(seed: int) -> None:
    x = random_blocks(seed)
    code, scale = quantize.kv_mxfp8(x)
    amax = x.view(8, 16, 32).abs().amax(-1)
    expected = [ceil_log2_over_448(max(a, 1e-4)) + 127 for a in amax.flatten().tolist()]
    assert scale.flatten().tolist() == expected
    step = torch.exp2(scale.double() - 127)[..., None]
    brute = codes.round_e4m3(x.double().view(8, 16, 32) / step)
    assert torch.equal(code.view(8, 16, 32), brute)
    assert (code & 0x7F).max() <= 0x7E


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31))
def test_quantizing_a_dequantized_row_changes_nothing(seed: int) -> None:
    code, scale = quantize.kv_mxfp8(random_blocks(seed))
    again, scale_again = quantize.kv_mxfp8(quantize.dequantize_mxfp8(code, scale))
    assert torch.equal(
        quantize.dequantize_mxfp8(again, scale_again), quantize.dequantize_mxfp8(code, scale)
    )


def test_activation_byte_is_t_rounded_up_to_a_power_of_two() -> None:
    bits = torch.arange(1, 0x7F80, 37, dtype=torch.int32) << 16  # a sweep of bf16 magnitudes
    amax = bits.view(torch.float32)
    x = torch.zeros(len(amax), 32)
    x[:, 5] = -amax
    code, scale = quantize.activation_mxfp8(x.bfloat16())
    t = (amax * torch.tensor(1 / 448)).tolist()
    for value, byte in zip(t, scale[:, 0].tolist(), strict=True):
        mantissa, exponent = math.frexp(value)  # value = mantissa · 2^exponent, mantissa in [.5, 1)
        if value >= 2.0**-126:
            assert byte == exponent - 1 + 127 + (mantissa != 0.5)
        else:
            assert byte == (value > 0)
    assert (code[:, 5] >= 0x80).all()


def test_activation_of_a_zero_block_has_byte_0_and_codes_0() -> None:
    code, scale = quantize.activation_mxfp8(torch.zeros(3, 64).bfloat16())
    assert (code == 0).all()
    assert (scale == 0).all()
    assert (quantize.dequantize_mxfp8(code, scale) == 0).all()


def test_activation_and_kv_exponents_differ_where_the_product_rounds() -> None:
    """1/448 is not a float32: 448 · fp32(1/448) may exceed 1, and then the byte is one more."""
    x = torch.zeros(1, 32)
    x[0, 0] = 448
    exact = (torch.tensor(448.0) * torch.tensor(1 / 448)).item()
    expected = 127 + (exact > 1.0)
    assert quantize.activation_mxfp8(x)[1].item() == expected


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31))
def test_nvfp4_is_true_division_then_the_nearest_code(seed: int) -> None:
    x = random_blocks(seed, spread=2.0)
    code, scale = quantize.nvfp4(x)
    blocks = x.view(8, 32, 16)
    target = (blocks.abs().amax(-1) * torch.tensor(1 / 6)).clamp(2.0**-9, 448)
    assert torch.equal(scale, codes.round_e4m3(target))
    quotient = blocks / codes.decode_e4m3(scale)[..., None]
    distance = (quotient.abs()[..., None] - codes.E2M1[:8]).abs()
    numbers = torch.arange(8)
    tied = torch.where(distance == distance.amin(-1, keepdim=True), numbers % 2 * 8 + numbers, 99)
    expected = tied.argmin(-1) + 8 * x.view(8, 32, 16).signbit()
    assert torch.equal(code.view(8, 32, 16).long(), expected)


def test_nvfp4_scale_is_clamped_at_both_ends() -> None:
    _, scale = quantize.nvfp4(torch.tensor([[0.0] * 16 + [1e6] * 16]))
    assert codes.decode_e4m3(scale).tolist() == [[2.0**-9, 448.0]]


def test_a_spike_moves_only_its_own_blocks_scale() -> None:
    x = torch.ones(1, 128)
    quiet = quantize.kv_mxfp8(x)[1]
    x[0, 40] = -1000
    loud = quantize.kv_mxfp8(x)[1]
    assert (quiet != loud).tolist() == [[False, True, False, False]]


def test_empty_batches_quantize_to_empty() -> None:
    code, scale = quantize.kv_mxfp8(torch.zeros(0, 512))
    assert code.shape == (0, 512)
    assert scale.shape == (0, 16)
    assert quantize.nvfp4(torch.zeros(0, 512))[1].shape == (0, 32)
