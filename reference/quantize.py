"""Block quantizers of the contract's section 5, exact on bits.

``x`` is float32 or float64 (bf16 is widened first) with the blocks along the last dim. Float64
input is quantized as such: that is how a caller finds out how close to a tie a float32 result was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .codes import (
    decode_e4m3,
    decode_ue8m0,
    floor_log2,
    power_of_two,
    round_e2m1,
    round_e4m3,
)

AMAX_FLOOR = torch.tensor(1e-4, dtype=torch.float32).item()
ONE_SIXTH = torch.tensor(1 / 6, dtype=torch.float32).item()
ONE_448TH = torch.tensor(1 / 448, dtype=torch.float32).item()


def widened(x: Tensor) -> Tensor:
    """bf16/fp16 as float32; float32 and float64 unchanged."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def block_amax(x: Tensor, block: int) -> Tensor:
    """max |x| over blocks of the last dim: ``[..., n]`` -> ``[..., n / block]``."""
    return torch.unflatten(widened(x), -1, (-1, block)).abs().amax(-1)


def spread(scales: Tensor, block: int) -> Tensor:
    """One value a block -> one value an element: ``[..., m]`` -> ``[..., m * block]``."""
    return scales.repeat_interleave(block, -1)


def scale_exponent(amax: Tensor) -> Tensor:
    """ue8m0 byte of KV and output blocks: ceil(log2(max(amax, 1e-4) / 448)) + 127, uint8 like
    ``amax``.

    448 = 1.75 · 2^8, so the exponent is that of amax minus 8, and one more exactly when the
    significand exceeds 1.75: a comparison of mantissa bits. No logarithm, no division.
    """
    amax = widened(amax).clamp(min=AMAX_FLOOR)
    exponent = floor_log2(amax)
    significand = amax * power_of_two(-exponent, amax.dtype)
    return (exponent - 8 + 127 + (significand > 1.75).int()).to(torch.uint8)


def mxfp8_codes(x: Tensor, scales: Tensor, block: int = 32) -> Tensor:
    """e4m3 of x · 2^(127 - byte) under given ue8m0 bytes.

    ``[..., n]``, ``[..., n/block]`` -> uint8.
    """
    x = widened(x)
    factor = power_of_two((127 - scales.int()).clamp(max=127), x.dtype)
    return round_e4m3(torch.unflatten(x, -1, (-1, block)) * factor.unsqueeze(-1)).flatten(-2)


def kv_mxfp8(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """KV and output MXFP8: ``[..., n]`` -> e4m3 codes ``[..., n]``, ue8m0 bytes ``[..., n/block]``.

    An all-zero block has byte 105. ``block`` is 64 only in the legacy 584-byte record.
    """
    scales = scale_exponent(block_amax(x, block))
    return mxfp8_codes(x, scales, block), scales


def activation_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Input of the wq_b and wo_b linears: ``[..., K]`` -> codes ``[..., K]``, bytes
    ``[..., K/32]``.

    t = fp32(amax) · fp32(1/448), rounded to float32; the byte is t's exponent field, plus one when
    its mantissa is not zero. No floor: a zero block has byte 0.
    """
    t = block_amax(x, 32).float() * ONE_448TH
    bits = t.view(torch.int32)
    scales = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()).to(torch.uint8)
    return mxfp8_codes(x, scales), scales


def nvfp4_scale(amax: Tensor) -> Tensor:
    """e4m3 byte of clamp(amax · fp32(1/6), 2^-9, 448), uint8 like ``amax``."""
    return round_e4m3((widened(amax) * ONE_SIXTH).clamp(2.0**-9, 448.0))


def nvfp4_codes(x: Tensor, scales: Tensor) -> Tensor:
    """e2m1 of x / scale (true division) under given e4m3 scale bytes.

    -> uint8 0..15, one an element.
    """
    x = widened(x)
    scale = decode_e4m3(scales, x.dtype)
    return round_e2m1(torch.unflatten(x, -1, (-1, 16)) / scale.unsqueeze(-1)).flatten(-2)


def nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4: ``[..., n]`` -> e2m1 codes ``[..., n]`` (one a byte), e4m3 scale bytes ``[.

    N/16]``.
    """
    scales = nvfp4_scale(block_amax(x, 16))
    return nvfp4_codes(x, scales), scales


def dequantize_mxfp8(
    codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, block: int = 32
) -> Tensor:
    """e4m3 · 2^(byte - 127): ``[..., n]``, ``[..., n/block]`` -> ``[..., n]``."""
    values = torch.unflatten(decode_e4m3(codes, dtype), -1, (-1, block))
    return values.mul_(decode_ue8m0(scales, dtype).unsqueeze(-1)).flatten(-2)
