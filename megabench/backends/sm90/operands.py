"""The operands of a grouped product, as the kernels that read the e4m3 weight take them."""

from __future__ import annotations

import torch

STAGE_COLUMNS = 128
"""Columns under one int32 word of scales."""


def operands(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
) -> tuple[int, ...]:
    """Pointers, strides, tokens and words of out bf16 [b, h, d] = x e4m3 [b, h, r] times w e4m3
    [h, d, r], with int32 scale words [b, h, r/128] and [h, d, r/128]: the first fields of a
    parameter block, in their order."""
    return (
        *(t.data_ptr() for t in (x, w, x_scale, w_scale, out)),
        *(x.stride(0), x.stride(1)),
        *(w.stride(1), w.stride(0)),
        *(x_scale.stride(0), x_scale.stride(1), x_scale.stride(2)),
        *(w_scale.stride(1), w_scale.stride(0), w_scale.stride(2)),
        *(out.stride(0), out.stride(1)),
        x.shape[0],
        x.shape[2] // STAGE_COLUMNS,
    )
