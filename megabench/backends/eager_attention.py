"""Sparse attention in eager torch: RoPE, scores, sink, inverse RoPE and the FP8 cast, unfused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megabench.formats import HEAD_DIM, NOPE_DIM
from megabench.layout import output_order
from megabench.quant import QuantizedActivation, quantize_kv_mxfp8


def rope(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate adjacent pairs of the last 64 dims of x [..., 512] in float32.

    cos_sin [..., 64] broadcasts over x's leading dims: 32 cosines, then 32 sines.
    """
    turned = x.to(torch.float32, copy=True)
    cos, sin = cos_sin.chunk(2, -1)
    sin = -sin if inverse else sin
    even, odd = turned[..., NOPE_DIM::2], turned[..., NOPE_DIM + 1 :: 2]
    pair = even * cos - odd * sin, even * sin + odd * cos
    turned[..., NOPE_DIM::2], turned[..., NOPE_DIM + 1 :: 2] = pair
    return turned


@dataclass(frozen=True)
class Attended:
    """Attention of some tokens: out float32 [t, H, 512], lse and max_logits float32 [t, H]."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor


def attend(
    q: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    cos_sin: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None,
    q_norm_eps: float | None,
) -> Attended:
    """Attend q bf16 [t, H, 512] (natural head order, not yet rotated) to rows [t, n, 512].

    Rows are bf16, or float32 of bf16's values. valid bool [t, n]; invalid rows must be zeros.
    cos_sin float32 [t, 64]. With `q_norm_eps`, scores are scaled by rsqrt(mean(q^2) + eps) of the
    un-rotated q. A token with no valid row has lse = +inf, max_logits = -inf and a zero output.
    """
    if rows.shape[1] == 0:
        rows, valid = rows.new_zeros((len(rows), 1, HEAD_DIM)), valid.new_zeros((len(rows), 1))
    cos_sin = cos_sin.unsqueeze(1)
    scores = _product(rope(q, cos_sin), rows.transpose(1, 2)).mul_(sm_scale)
    if q_norm_eps is not None:
        scores *= torch.rsqrt(q.float().square().mean(-1, keepdim=True) + q_norm_eps)
    scores.masked_fill_(~valid.unsqueeze(1), -torch.inf)
    max_logits = scores.amax(-1)
    empty = max_logits == -torch.inf
    weights = scores.sub_(max_logits.masked_fill(empty, 0.0).unsqueeze(-1)).exp_()
    total = weights.sum(-1)
    lse = torch.where(empty, torch.inf, max_logits + total.log())
    out = _product(weights, rows)
    factor = 1.0 / total
    if attn_sink is not None:
        factor = factor / (1.0 + torch.exp(attn_sink - lse))
    out = rope(out.mul_(factor.unsqueeze(-1)), cos_sin, inverse=True)
    # Selected, not multiplied: zero times a negative cosine would leave the code of -0.
    return Attended(out.masked_fill_(empty.unsqueeze(-1), 0.0), lse, max_logits)


def _product(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """float32 [t, H, n] of x float32 [t, H, k], rounded to bf16, and rows [t, k, n]."""
    x = x.to(torch.bfloat16)
    if rows.dtype == torch.bfloat16:
        return torch.bmm(x, rows, out_dtype=torch.float32)
    return torch.bmm(x.to(torch.float32), rows)


def store_output(out: torch.Tensor, target: QuantizedActivation) -> None:
    """Cast out float32 [t, H, 512] per 32 dims and write codes and scale words of those tokens."""
    codes, scale = quantize_kv_mxfp8(out)
    target.data.view(torch.uint8).copy_(output_order(codes))
    target.scale.copy_(output_order(scale).contiguous().view(torch.int32))
