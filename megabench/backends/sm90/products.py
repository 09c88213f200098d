"""The matrix products of the `sm90` backend: which kernel serves a call, and its operands.

A handful of tokens and few tokens stream the e4m3 weight (skinny.cu, product.cu). Where that makes
more tiles than run at once arithmetic binds, and a bf16 form of the weight that `prepare` made
saves its conversion (dense.cu). A linear is served for a handful of tokens: Triton's is slower.
"""

from __future__ import annotations

import torch

from megabench.backends.base import Pair
from megabench.backends.eager_matmul import DenseWeights
from megabench.backends.sm90 import dense_launch, product_launch, skinny_launch
from megabench.backends.sm90.operands import STAGE_COLUMNS
from megabench.backends.sm90.quantize_launch import quantize

MULTIPROCESSORS = 132
"""Of an H100 or H200 SXM. A tile takes product.cu 37 us and dense.cu, whose tiles are twice as
large, 41 (docs/kernels.md): the first is faster while each of its tiles has a multiprocessor."""


class PieceWeights(DenseWeights):
    """Operand pieces of bf16 weights, by the identity of the quantized one."""

    def _dense(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        dense = super()._dense(weight, scale).bfloat16()
        return dense_launch.operand_pieces(dense.view(-1, *dense.shape[-2:]))


def can_prepare(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether `weight` is an einsum's, with packed scales, and divides into pieces."""
    rows, columns = weight.shape[-2:]
    return (
        scale.dtype == torch.int32
        and rows % dense_launch.PIECE_ROWS == 0
        and columns % STAGE_COLUMNS == 0
    )


def _aligned(x: torch.Tensor) -> bool:
    """Whether rows of [a, b, c], if any, are dense, lie apart (an expanded tensor's do not, which a
    tensor map cannot say) and start at multiples of 16 bytes."""
    if x.numel() == 0:
        return True
    steps = [x.stride(i) for i in (0, 1) if x.shape[i] > 1]
    places = (x.data_ptr(), *(step * x.element_size() for step in steps))
    apart = all(step >= x.shape[2] for step in steps)
    return x.stride(2) == 1 and apart and all(place % 16 == 0 for place in places)


def _whole_tiles(w: torch.Tensor) -> bool:
    rows, columns = w.shape[-2:]
    return rows % product_launch.ROWS == 0 and columns % STAGE_COLUMNS == 0 < columns


def serves(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the kernels can read checked operands of the einsum: whole tiles, aligned rows."""
    return _whole_tiles(w) and all(_aligned(t) for t in (x, w, out))


def einsum(x: Pair, w: Pair, out: torch.Tensor, pieces: torch.Tensor | None) -> None:
    """out bf16 [b, h, d] of x e4m3 [b, h, r] and w e4m3 [h, d, r], packed int32 scales per 32;
    `pieces` is w's bf16 form, if that was kept."""
    if out.numel() == 0:
        return
    if skinny_launch.serves(x[0], w[0], x[1], w[1], out):
        skinny_launch.launch(*x, *w, out)
    elif pieces is not None and product_launch.tiles_of(*out.shape) > MULTIPROCESSORS:
        dense_launch.launch(*x, pieces, out)
    else:
        product_launch.launch(*x, *w, out)


def serves_linear(x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> bool:
    """Whether the kernels can read checked operands of a linear, and win."""
    return (
        skinny_launch.serves(x[:, None], w[None])
        and _whole_tiles(w)
        and sw.is_contiguous()
        and sw.storage_offset() % 4 == 0
        and all(_aligned(t[:, None]) for t in (x, w))
    )


def linear(x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
    """bf16 [T, N] of x bf16 [T, K], quantized per token and 32 columns, and w e4m3 [N, K] with sw
    uint8 [N, K/32]."""
    out = x.new_empty((x.shape[0], w.shape[0]))
    if out.numel() > 0:
        codes, words = quantize(x)
        operand, weight = (codes[:, None], words[:, None]), (w[None], sw.view(torch.int32)[None])
        skinny_launch.launch(*operand, *weight, out[:, None])
    return out
