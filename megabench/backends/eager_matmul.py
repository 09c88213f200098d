"""Products of exactly dequantized operands in eager torch, accumulated in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megabench.backends.base import EINSUM, EINSUM_RECIPE, Pair
from megabench.backends.checks import check_tensor, require
from megabench.formats import QUANT_GROUP
from megabench.quant import dequantize_mxfp8, quantize_activation, unpack_scales


class DenseWeights:
    """Dequantized weights by the identity of the quantized one; an entry dies with its weight.

    A weight that was written to after `prepare`, or that comes with another scale, is dequantized
    afresh: never stale, only slow.
    """

    def __init__(self) -> None:
        self._made: Any = WeakIdKeyDictionary()

    def prepare(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Make and keep the dense form of e4m3 `weight` with its ue8m0 `scale`."""
        self._made[weight] = (_state(weight, scale), self._dense(weight, scale))

    def kept(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
        """The dense form that `prepare` made of these two, unless one was written to since."""
        made = self._made.get(weight)
        if made is None or made[0] != _state(weight, scale):
            return None
        dense: torch.Tensor = made[1]
        return dense

    def get(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The dense form, kept or made now: float32 on a CPU, bf16 (exact) on a GPU."""
        kept = self.kept(weight, scale)
        return self._dense(weight, scale) if kept is None else kept

    def _dense(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        packed = scale.dtype == torch.int32
        scale_bytes = unpack_scales(scale) if packed else scale.view(torch.uint8)
        return dequantize_mxfp8(weight, scale_bytes).to(operand_dtype(weight.device))


def operand_dtype(device: torch.device) -> torch.dtype:
    """Of products whose operands are exact in bf16: as such on a GPU, which adds them up in float32
    all the same, else float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _state(weight: torch.Tensor, scale: torch.Tensor) -> tuple[int, int, int, int]:
    """What changes when either is written to, or another takes its place."""
    return weight._version, weight.data_ptr(), scale._version, scale.data_ptr()


def linear(
    x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor, weights: DenseWeights
) -> torch.Tensor:
    """x bf16 [T, K], quantized per 32 columns, times w e4m3 [N, K], sw uint8 [N, K/32] -> bf16."""
    check_tensor("w", w, torch.float8_e4m3fn, (None, None), x.device)
    check_tensor("x", x, torch.bfloat16, (None, w.shape[1]), x.device)
    check_tensor("sw", sw, torch.uint8, (w.shape[0], w.shape[1] // QUANT_GROUP), x.device)
    dense = weights.get(w, sw)
    operand = dequantize_mxfp8(*quantize_activation(x)).to(dense.dtype)
    return _matmul(operand.unsqueeze(0), dense.unsqueeze(0)).squeeze(0)


def fp8_einsum(
    equation: str,
    x: Pair,
    w: Pair,
    out: torch.Tensor,
    recipe: tuple[int, int, int],
    weights: DenseWeights,
) -> None:
    """out bf16 [b, h, d] = x e4m3 [b, h, r] times w e4m3 [h, d, r], packed int32 scales per 32."""
    require(equation == EINSUM, "equation", f"only {EINSUM!r} is supported, got {equation!r}")
    require(tuple(recipe) == EINSUM_RECIPE, "recipe", f"only {EINSUM_RECIPE} is supported")
    (data, scale), (weight, weight_scale) = x, w
    check_tensor("x[0]", data, torch.float8_e4m3fn, (None, None, None), data.device)
    device, (b, h, r), d = data.device, data.shape, weight.shape[1]
    words = r // (4 * QUANT_GROUP)
    check_tensor("x[1]", scale, torch.int32, (b, h, words), device)
    check_tensor("w[0]", weight, torch.float8_e4m3fn, (h, d, r), device)
    check_tensor("w[1]", weight_scale, torch.int32, (h, d, words), device)
    check_tensor("out", out, torch.bfloat16, (b, h, d), device)
    dense = weights.get(weight, weight_scale)
    operand = dequantize_mxfp8(data, unpack_scales(scale)).to(dense.dtype)
    out.copy_(_matmul(operand.transpose(0, 1), dense).transpose(0, 1))


def _matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """bf16 [g, t, n] of x [g, t, k] and w [g, n, k], accumulated in float32."""
    if x.dtype == torch.bfloat16:
        return torch.bmm(x, w.transpose(1, 2), out_dtype=torch.float32).to(torch.bfloat16)
    return torch.bmm(x, w.transpose(1, 2)).to(torch.bfloat16)
