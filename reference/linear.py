"""The three FP8 linears: wq_b and wo_b quantize their input, wo_a takes the attention output.

Values are sums before the bf16 rounding of the result: an implementation is right when its bf16's
rounding interval, widened by the bound, contains the value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .bounds import Bounded, block_norms, gamma, own_share
from .model import HEADS_PER_GROUP
from .quantize import activation_mxfp8, dequantize_mxfp8


@dataclass(frozen=True)
class Weight:
    """A dequantized weight to be reused.

    ``value [..., N, K]``, ``norms`` fp32 ``[..., N, K/32]``.
    """

    value: Tensor
    norms: Tensor


def dequantize_weight(w: Tensor, s: Tensor, dtype: torch.dtype = torch.float32) -> Weight:
    """e4m3 bytes ``w [..., N, K]`` and ue8m0 bytes ``s [..., N, K/32]`` -> :class:`Weight`."""
    value = dequantize_mxfp8(w, s, dtype)
    return Weight(value, block_norms(value))


def _prepared(w: Tensor | Weight, s: Tensor | None, dtype: torch.dtype) -> Weight:
    if isinstance(w, Weight):
        return w
    if s is None:
        raise ValueError("w: quantized codes need their scales")
    return dequantize_weight(w, s, dtype)


def linear(
    x: Tensor, w: Tensor | Weight, s: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Bounded:
    """x · Wᵀ with x quantized per token and 32 columns: bf16 ``[T, K]`` -> ``[T, N]``.

    ``w`` is e4m3 bytes ``[N, K]`` with ue8m0 bytes ``s [N, K/32]``, or a prepared :class:`Weight`
    whose dtype then decides the arithmetic.
    """
    weight = _prepared(w, s, dtype)
    a = dequantize_mxfp8(*activation_mxfp8(x), weight.value.dtype)
    scale = gamma(a.shape[-1]) * own_share(a.dtype)
    return Bounded(a @ weight.value.T, scale * (block_norms(a) @ weight.norms.T))


def wo_a(
    codes: Tensor,
    scales: Tensor,
    w: Tensor | Weight,
    s: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Bounded:
    """Grouped einsum of the attention output with wo_a in its *standard* column order.

    ``codes`` uint8 ``[T, H, 512]``, ``scales`` uint8 ``[T, H, 16]``, ``w`` e4m3 bytes
    ``[G, d, 4096]`` with ``s [G, d, 128]`` (or a :class:`Weight`), H = 8 G -> ``[T, G, d]``.
    """
    weight = _prepared(w, s, dtype)
    heads = dequantize_mxfp8(codes, scales, weight.value.dtype)
    a = torch.unflatten(heads, 1, (-1, HEADS_PER_GROUP)).flatten(2).transpose(0, 1)
    value = torch.bmm(a, weight.value.transpose(1, 2)).transpose(0, 1)
    magnitude = torch.bmm(block_norms(a), weight.norms.transpose(1, 2)).transpose(0, 1)
    return Bounded(value, gamma(a.shape[-1]) * own_share(a.dtype) * magnitude)
