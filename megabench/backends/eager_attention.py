"""Sparse attention in eager torch: RoPE, scores, sink, inverse RoPE and the FP8 cast, unfused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megabench.formats import NOPE_DIM
from megabench.layout import output_order
from megabench.quant import QuantizedActivation, quantize_kv_mxfp8


def rope(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate adjacent pairs of the last 64 dims of x [..., 512] in float32.

    cos_sin [..., 64] broadcasts over x's leading dims: 32 cosines, then 32 sines.
    """
    x = x.to(torch.float32)
    cos, sin = cos_sin.chunk(2, -1)
    sin = -sin if inverse else sin
    even, odd = x[..., NOPE_DIM::2], x[..., NOPE_DIM + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :NOPE_DIM], turned), -1)


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
    """Attend q bf16 [t, H, 512] (natural head order, not yet rotated) to rows float32 [t, n, 512].

    valid bool [t, n]; invalid rows must be zeros. cos_sin float32 [t, 64]. With `q_norm_eps`,
    scores are scaled by rsqrt(mean(q^2) + eps) of the un-rotated q. A token with no valid row has
    lse = +inf, max_logits = -inf and a zero output.
    """
    cos_sin = cos_sin.unsqueeze(1)
    rotated = rope(q, cos_sin).to(torch.bfloat16).to(torch.float32)
    scores = torch.bmm(rotated, rows.transpose(1, 2)) * sm_scale
    if q_norm_eps is not None:
        scores *= torch.rsqrt(q.float().square().mean(-1, keepdim=True) + q_norm_eps)
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    if scores.shape[-1] == 0:
        scores = scores.new_full((*scores.shape[:2], 1), -torch.inf)
        rows = rows.new_zeros((rows.shape[0], 1, rows.shape[2]))
    max_logits = scores.amax(-1)
    empty = max_logits == -torch.inf
    weights = torch.exp(scores - max_logits.masked_fill(empty, 0.0).unsqueeze(-1))
    total = weights.sum(-1)
    lse = torch.where(empty, torch.inf, max_logits + total.log())
    out = torch.bmm(weights.to(torch.bfloat16).to(torch.float32), rows)
    factor = 1.0 / total
    if attn_sink is not None:
        factor = factor / (1.0 + torch.exp(attn_sink - lse))
    out = rope(out * factor.unsqueeze(-1), cos_sin, inverse=True)
    # Selected, not multiplied: zero times a negative cosine would leave the code of -0.
    return Attended(torch.where(empty.unsqueeze(-1), 0.0, out), lse, max_logits)


def store_output(out: torch.Tensor, target: QuantizedActivation) -> None:
    """Cast out float32 [t, H, 512] per 32 dims and write codes and scale words of those tokens."""
    codes, scale = quantize_kv_mxfp8(out)
    target.data.view(torch.uint8).copy_(output_order(codes))
    target.scale.copy_(output_order(scale).contiguous().view(torch.int32))
