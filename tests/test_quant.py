"""Quantizers, packing and output buffers of the production side."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabench import quant

FLOAT32_BITS = st.integers(min_value=0, max_value=0x7F7FFFFF)


def as_float(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32).item()


def block(amax: float) -> torch.Tensor:
    x = torch.zeros(1, 32)
    x[0, 7] = -amax
    return x


@given(FLOAT32_BITS)
def test_the_kv_scale_is_the_least_power_of_two_that_fits_the_floored_amax(bits: int) -> None:
    amax = as_float(bits)
    _, scale = quant.quantize_kv_mxfp8(block(amax))
    exponent = int(scale.item()) - 127
    floored = max(amax, torch.tensor(1e-4).item())
    assert floored <= 448.0 * 2.0**exponent
    assert floored > 448.0 * 2.0 ** (exponent - 1)


@pytest.mark.parametrize("k", [-14, -3, 0, 9, 100])
def test_an_amax_of_exactly_448_times_a_power_of_two_keeps_that_power(k: int) -> None:
    edge = torch.tensor(448.0 * 2.0**k)
    above = torch.nextafter(edge, torch.tensor(math.inf))
    for amax, byte in ((edge, 127 + k), (above, 128 + k)):
        _, scale = quant.quantize_kv_mxfp8(block(amax.item()))
        assert scale.item() == byte


def test_an_all_zero_kv_block_has_byte_105_and_zero_codes() -> None:
    codes, scale = quant.quantize_kv_mxfp8(torch.zeros(2, 64))
    assert (scale == 105).all()
    assert (codes == 0).all()


def test_an_all_zero_activation_block_has_byte_0_and_zero_codes() -> None:
    codes, scale = quant.quantize_activation(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert (scale == 0).all()
    assert (codes == 0).all()


@given(FLOAT32_BITS)
def test_the_activation_scale_rounds_amax_over_448_up_to_a_power_of_two(bits: int) -> None:
    amax = as_float(bits)
    _, scale = quant.quantize_activation(block(amax))
    t = (torch.tensor(amax) * torch.tensor(1.0 / 448.0)).item()
    byte = int(scale.item())
    if t == 0:
        assert byte == 0
    else:
        assert t <= 2.0 ** (byte - 127)
        assert byte <= 1 or t > 2.0 ** (byte - 128)


@given(st.lists(st.floats(-6e4, 6e4, width=32), min_size=32, max_size=32))
def test_dequantized_kv_blocks_are_within_half_a_step_of_the_input(values: list[float]) -> None:
    x = torch.tensor([values], dtype=torch.float32)
    codes, scale = quant.quantize_kv_mxfp8(x)
    back = quant.dequantize_mxfp8(codes, scale)
    unit = 2.0 ** (int(scale.item()) - 127)
    # e4m3 has 3 fraction bits: half a step is 2^-4 of the value, or 2^-10 below its normal range.
    assert (
        (back - x).abs() <= torch.maximum(x.abs() * 2.0**-4, torch.tensor(unit * 2.0**-10))
    ).all()


def test_e4m3_codes_saturate_and_keep_the_sign_of_zero() -> None:
    x = torch.tensor([1e9, -1e9, 449.0, -0.0, 464.0])
    assert quant.encode_e4m3(x).tolist() == [0x7E, 0xFE, 0x7E, 0x80, 0x7E]


def test_e2m1_ties_go_to_the_even_code_and_large_values_saturate() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0])
    assert quant.encode_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    assert quant.encode_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14, 15]


def test_nvfp4_packs_the_even_element_in_the_low_nibble() -> None:
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6.0, -3.0
    pairs, scale = quant.quantize_nvfp4(x)
    assert quant.decode_e4m3(scale).item() == 1.0
    assert pairs[0, 0].item() == 7 | (13 << 4)
    assert torch.equal(quant.dequantize_nvfp4(pairs, scale), x)


def test_nvfp4_scales_never_fall_below_the_least_e4m3() -> None:
    _, scale = quant.quantize_nvfp4(torch.zeros(1, 16))
    assert quant.decode_e4m3(scale).item() == 2.0**-9


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))
def test_packed_scales_are_mn_major_little_endian_words(rows: int, groups: int, words: int) -> None:
    scale = torch.randint(0, 255, (groups, rows, 4 * words), dtype=torch.uint8)
    packed = quant.pack_mn_major(scale)
    assert packed.shape == (groups, rows, words)
    aligned = -(-rows // 4) * 4
    assert packed.stride() == (words * aligned, 1, aligned)
    for byte in range(4):
        assert torch.equal(((packed >> (8 * byte)) & 255).to(torch.uint8), scale[..., byte::4])
    assert torch.equal(quant.unpack_scales(packed), scale)


@given(st.integers(1, 9))
def test_the_output_pair_has_the_strides_the_kernel_and_the_einsum_demand(tokens: int) -> None:
    out = quant.alloc_mega_attn_output(tokens, 8, torch.device("cpu"))
    aligned = -(-tokens // 4) * 4
    assert out.data.shape == (tokens, 8, 4096)
    assert out.data.is_contiguous()
    assert out.scale.shape == (tokens, 8, 32)
    assert out.scale.stride() == (1, 32 * aligned, aligned)
