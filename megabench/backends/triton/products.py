"""Products of exactly dequantized fp8 operands: the wq_b and wo_b linears and the wo_a einsum.

With few tokens the e4m3 weight is streamed (matmul.py). With many, where arithmetic binds, the bf16
weight that `prepare` kept goes to the vendor's library.
"""

from __future__ import annotations

import torch
import triton

from megabench.backends.triton.matmul import dequantize_kernel, launch, round_trip_kernel
from megabench.backends.triton.target import Target, target_of
from megabench.formats import QUANT_GROUP

ROUND_TRIP_COLUMNS = 1024
DEQUANTIZE_ROWS = 8
DEQUANTIZE_COLUMNS = 1024
DENSE_TOKENS = 64
"""From here a product is bound by arithmetic, and one of bf16 operands is faster, if `prepare` made
the weight's bf16 form."""


def _row_words(scale: torch.Tensor) -> torch.Tensor:
    """int32 words [N, ceil(n/4)] of ue8m0 bytes uint8 [N, n]; a view where n is a multiple of 4."""
    bytes_ = scale.view(torch.uint8)
    if bytes_.shape[1] % 4:
        bytes_ = torch.nn.functional.pad(bytes_, (0, -bytes_.shape[1] % 4))
    return bytes_.view(torch.int32)


def linear(
    x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor, dense: torch.Tensor | None
) -> torch.Tensor:
    """bf16 [T, N] of x bf16 [T, K], quantized per token and 32 columns, and w e4m3 [N, K] with sw
    uint8 [N, K/32]; `dense` is w dequantized, if that was kept."""
    tokens, k = x.shape
    out = x.new_empty((tokens, w.shape[0]))
    if tokens == 0:
        return out
    target = target_of(x.device)
    rounded = x.new_empty((tokens, k))
    columns = min(ROUND_TRIP_COLUMNS, triton.next_power_of_2(k))
    round_trip_kernel[(tokens, triton.cdiv(k, columns))](
        x,
        x.stride(0),
        rounded,
        k,
        COLUMNS=max(columns, QUANT_GROUP),
        EMULATE=target.emulate,
        FP8_CVT=target.fp8_cvt,
        num_warps=4,
    )
    if dense is None or tokens < DENSE_TOKENS:
        launch(rounded[None], w[None], _row_words(sw)[None], out[None], target)
    else:
        _dense_product(rounded[None], dense[None], out[None])
    return out


def fp8_einsum(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    dense: torch.Tensor | None,
) -> None:
    """out bf16 [b, h, d] of x e4m3 [b, h, r] and w e4m3 [h, d, r], packed int32 scales per 32."""
    if x.shape[0] == 0:
        return
    target = target_of(x.device)
    operand = _dequantize(x.transpose(0, 1), x_scale.transpose(0, 1), target)
    if dense is None or x.shape[0] < DENSE_TOKENS:
        launch(operand, w, w_scale, out.transpose(0, 1), target)
    else:
        _dense_product(operand, dense, out.transpose(0, 1))


def _dequantize(x: torch.Tensor, x_scale: torch.Tensor, target: Target) -> torch.Tensor:
    """bf16 [G, T, K] of e4m3 [G, T, K] with packed scales: its re-use by many weight tiles costs
    less than converting it for each."""
    groups, tokens, k = x.shape
    out = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(tokens, DEQUANTIZE_ROWS), triton.cdiv(k, DEQUANTIZE_COLUMNS), groups)
    dequantize_kernel[grid](
        x.view(torch.uint8),
        x_scale,
        x.stride(1),
        x.stride(0),
        x_scale.stride(1),
        x_scale.stride(2),
        x_scale.stride(0),
        out,
        out.stride(1),
        out.stride(0),
        tokens,
        k,
        ROWS=DEQUANTIZE_ROWS,
        COLUMNS=DEQUANTIZE_COLUMNS,
        EMULATE=target.emulate,
        num_warps=4,
    )
    return out


def _dense_product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out [G, T, D] of bf16 x [G, T, K] and w [G, D, K] by the vendor's library.

    Partial sums stay in float32: a split reduction may otherwise add them in bf16.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        torch.bmm(x, w.transpose(1, 2), out=out)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
