"""A stand-in for `deep_gemm` (sgl-deep-gemm 0.2.5, vLLM's copy): SM100 rules, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import vendor_math
from torch import Tensor
from vendor_checks import check_scales, demand

__version__ = "0.2.5+standin"
Pair = tuple[Tensor, Tensor]


def fp8_einsum(
    expr: str,
    a: Pair,
    b: Pair,
    d: Any,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 128, 128),
    epilogue: Any = None,
) -> None:
    """d[b, h, d] = a[b, h, r] . b[h, d, r]; int32 scales go with recipe (1, 1, 32) only."""
    demand(expr == "bhr,hdr->bhd", f"Unsupported einsum expression: {expr}")
    demand(tuple(recipe) == (1, 1, 32), "Unknown SF transformation")
    demand(c is None and epilogue is None, "the stand-in accumulates nothing")
    x, sx = a[0].transpose(0, 1), a[1].transpose(0, 1)
    w, sw = b
    demand(x.dtype == w.dtype == torch.float8_e4m3fn, "operands are e4m3")
    demand(x.stride(-1) == 1 and w.is_contiguous(), "operands are K-major")
    demand(d.dtype == torch.bfloat16 and d.stride(-1) == 1, "d is bf16 and N-major")
    demand(tuple(d.shape) == (x.shape[1], x.shape[0], w.shape[1]), "d has the wrong shape")
    check_scales("sfa", sx, x.shape[1], x.shape[2])
    check_scales("sfb", sw, w.shape[1], w.shape[2])
    d.copy_(vendor_math.product(x, sx, w, sw).transpose(0, 1))


def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
    epilogue: Any = None,
) -> None:
    """d[m, n] = a[m, k] . b[n, k]. Without a recipe int32 scales mean one per 128 columns."""
    (x, sx), (w, sw) = a, b
    demand(x.dtype == w.dtype == torch.float8_e4m3fn, "operands are e4m3")
    demand(x.stride(-1) == 1 and w.stride(-1) == 1, "operands are K-major")
    demand(x.shape[1] == w.shape[1], "k == k_")
    demand(tuple(d.shape) == (x.shape[0], w.shape[0]), "m == m_ and n == n_")
    demand(d.dtype == torch.bfloat16 and d.stride(-1) == 1, "d is bf16 and N-major")
    if 0 in d.shape:
        return
    demand(recipe is not None and tuple(recipe) == (1, 1, 32), "Unknown SF transformation")
    check_scales("sfa", sx, *x.shape)
    check_scales("sfb", sw, *w.shape)
    d.copy_(vendor_math.product(x, sx, w, sw))
