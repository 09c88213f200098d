"""Rotary embedding on adjacent pairs of the last 64 dims.

A cos/sin row is 64 wide: 32 cosines, then 32 sines; pair i is dims (2i, 2i + 1) of the rotated
part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .model import Model

ROPE_DIM = 64
FP32_SLACK = 2.0**-22
"""Relative to |a·cos| + |b·sin|, what float32 evaluation of one rotated element may be off, fused
multiply-add or not: two products and one sum are three roundings of 2^-24."""


def inverse_frequencies(model: Model, compressed: bool) -> Tensor:
    """fp32 ``[32]``: plain RoPE for SWA-only layers, YaRN with its own base for compressed ones."""
    dim = model.rope_dim
    base = model.compress_rope_theta if compressed else model.rope_theta
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if not compressed:
        return torch.tensor(plain, dtype=torch.float32)

    def dim_of(turns: float) -> float:
        wavelengths = model.yarn_original_max_position / (2 * math.pi * turns)
        return dim * math.log(wavelengths) / (2 * math.log(base))

    low = max(math.floor(dim_of(model.yarn_beta_fast)), 0)
    high = min(math.ceil(dim_of(model.yarn_beta_slow)), dim - 1)
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
    mixed = [f * (1 - r) + f / model.yarn_factor * r for f, r in zip(plain, ramp, strict=True)]
    return torch.tensor(mixed, dtype=torch.float32)


def cos_sin_table(positions: Tensor | int, compressed: bool, model: Model | None = None) -> Tensor:
    """fp32 ``[P, 64]`` for the given positions ``[P]``, or for 0..P-1 when an int is given.

    angle = fp32(position) · inv_freq in float32; its cosine and sine are taken in float64 and
    rounded.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions)
    frequencies = inverse_frequencies(model or Model(), compressed).to(positions.device)
    angle = positions.float()[:, None] * frequencies
    exact = angle.double()
    return torch.cat([exact.cos(), exact.sin()], dim=-1).float()


def _pairs(x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cos, sin = cos_sin.to(x.dtype).chunk(2, dim=-1)
    return x[..., 0::2], x[..., 1::2], cos, sin


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """RoPE of ``[..., 64]`` by cos/sin rows that broadcast against it.

    In x's dtype (float32/float64).
    """
    even, odd, cos, sin = _pairs(x, cos_sin)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def unrotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Inverse (conjugate) RoPE of ``[..., 64]``."""
    even, odd, cos, sin = _pairs(x, cos_sin)
    return torch.stack([even * cos + odd * sin, odd * cos - even * sin], dim=-1).flatten(-2)


def rotated_magnitude(x: Tensor, cos_sin: Tensor) -> Tensor:
    """|x_even·cos| + |x_odd·sin| and its partner, ``[..., 64]``.

    What a rotation can make of errors |x|.
    """
    even, odd, cos, sin = _pairs(x.abs(), cos_sin.abs())
    return torch.stack([even * cos + odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def on_rope_dims(x: Tensor, rotated: Tensor) -> Tensor:
    """``x [..., 512]`` with its last 64 dims replaced by ``rotated [..., 64]``."""
    return torch.cat([x[..., : -rotated.shape[-1]], rotated], dim=-1)
