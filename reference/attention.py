"""Sparse attention with a sink, from un-roped Q to the output after inverse RoPE.

Each value comes with a bound on what rounding allows; probabilities are not rounded here, an
implementation's are. With S = Σ|q||k| (by block norms), a score may err by δ = scale · γ(512) · S,
plus scale · |Δq||k| where a RoPE'd q lies so near a bf16 tie that it may round either way. Then

    |o - golden| <= (2^-8 + n · 2^-22 + exp(2 max δ) - 1 + sink term) · Σ p|v| · sink factor
                    + 2^-126 · n · (1 + max |v|)

per dim before the inverse RoPE, which mixes the bounds of a pair through |cos| and |sin|: 2^-8 is
the bf16 rounding of p, n · 2^-22 an fp32 accumulation over n rows by tensor cores, and the sink
term what fp32 makes of sink - lse in 1 / (1 + exp(sink - lse)). δ rests on S, not on max |score|:
when large products cancel, scores are small and their errors are not; it counts twice, in a row's
own exponential and in the sum that divides it. The last line is underflow: a probability or a
product below the least normal number may vanish.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .bounds import BF16_ROUNDOFF, block_norms, gamma, own_share
from .codes import round_bf16
from .rope import FP32_SLACK, ROPE_DIM, on_rope_dims, rotate, rotated_magnitude, unrotate
from .rows import Rows

CHUNK_BYTES = 192 << 20
LEAST_NORMAL = 2.0**-126
"""Of bf16 and float32; an implementation may flush what is smaller."""


class Attended(NamedTuple):
    """Attention of T tokens: ``o [T, H, 512]`` after inverse RoPE, ``lse`` and
    ``max_logits [T, H]``.

    Values are in the arithmetic dtype, bounds (same shapes) in float32. Without a valid row: o = 0,
    lse = +inf, max_logits = -inf, bounds 0. ``lse`` is natural and without the sink.
    """

    o: Tensor
    bound: Tensor
    lse: Tensor
    lse_bound: Tensor
    max_logits: Tensor
    max_logits_bound: Tensor


def rope_q(q_heads: Tensor, cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q_r: un-roped bf16 ``[T, H, 512]`` and rows ``[T, 64]`` -> RoPE'd, its RoPE dims rounded to
    bf16.

    Also Δq ``[T, H, 64]``: one bf16 step where the float64 value is within fp32's slack of a tie.
    """
    part, cos_sin = q_heads[..., -ROPE_DIM:], cos_sin[:, None]
    turned = round_bf16(rotate(part.to(dtype), cos_sin))
    exact = rotate(part.double(), cos_sin)
    slack = FP32_SLACK * rotated_magnitude(part.double(), cos_sin)
    step = round_bf16(exact + slack) - round_bf16(exact - slack)
    return on_rope_dims(q_heads.to(dtype), turned), step.float()


def _bytes_per_token(heads: int, rows: int, dtype: torch.dtype) -> int:
    width = torch.finfo(dtype).bits // 8
    return rows * 512 * (3 * 4 + width) + 4 * heads * rows * width + 6 * heads * 512 * width


def _attend_chunk(
    q_heads: Tensor,
    cos_sin: Tensor,
    values: Tensor,
    valid: Tensor,
    sinks: Tensor,
    scale: float,
    dtype: torch.dtype,
    q_norm_eps: float | None,
    bounds: bool,
    sums_rounded_p: bool,
) -> Attended:
    if values.shape[1] == 0:
        values, valid = values.new_zeros(len(values), 1, 512), valid.new_zeros(len(valid), 1)
    q, q_step = rope_q(q_heads, cos_sin, dtype)
    scales = torch.full_like(q[..., 0], scale)
    if q_norm_eps is not None:
        scales = scales * (q_heads.to(dtype).square().mean(-1) + q_norm_eps).rsqrt()

    # A row that is not valid may hold NaN, and 0 · NaN is NaN: clear it before any product.
    rows = values.float().masked_fill(~valid[..., None], 0)
    kv = rows.to(dtype)
    score = torch.bmm(q, kv.transpose(1, 2)).mul_(scales[..., None])
    score.masked_fill_(~valid[:, None], -math.inf)
    some = valid.any(-1)[:, None]
    top = score.amax(-1)
    shift = torch.where(some, top, 0)
    p = score.sub_(shift[..., None]).exp_()
    total = torch.where(some, p.sum(-1), 1)
    finite_lse = shift + total.log()
    lse = torch.where(some, finite_lse, math.inf)
    p = p.div_(total[..., None])
    sinks = sinks.to(dtype)
    factor = torch.sigmoid(finite_lse - sinks)
    o = torch.bmm(p, kv).mul_(factor[..., None])
    cos_sin = cos_sin[:, None]

    none = torch.zeros((), dtype=torch.float32, device=o.device)
    bound, lse_bound, top_bound = none, none, none
    if bounds:
        k_norms = block_norms(rows)
        doubt = gamma(512) * own_share(dtype) * block_norms(q)
        doubt[..., -ROPE_DIM // 32 :] += block_norms(q_step)
        delta = torch.bmm(doubt, k_norms.transpose(1, 2)).amax(-1) * scales.float()
        sums = values.shape[1] * 2.0**-22 * own_share(dtype)
        reach = torch.where(sinks.isfinite(), sinks, 0).abs() + finite_lse.abs()
        sink_term = (1 - factor) * reach * 2.0**-22
        relative = BF16_ROUNDOFF + 2.0**-22 + sums + torch.expm1(2 * delta) + sink_term.float()
        spread = torch.bmm(p.float(), rows.abs_())
        bound = spread.mul_((relative * factor.float())[..., None])
        lost = LEAST_NORMAL + LEAST_NORMAL * rows.amax(1, keepdim=True)
        bound += values.shape[1] * lost
        if sums_rounded_p:
            bound += BF16_ROUNDOFF * o.abs().float()
        turned = rotated_magnitude(bound[..., -ROPE_DIM:], cos_sin)
        bound = torch.where(some[..., None], on_rope_dims(bound, turned), 0)
        logs = values.shape[1] * 2.0**-24 + 2.0**-21 + sums_rounded_p * BF16_ROUNDOFF
        lse_bound = torch.where(some, delta + logs + 2.0**-22 * finite_lse.abs().float(), 0)
        top_bound = torch.where(some, delta + 2.0**-22 * shift.abs().float(), 0)
    o = on_rope_dims(o, unrotate(o[..., -ROPE_DIM:], cos_sin))
    o = torch.where(some[..., None], o, 0)
    return Attended(o, bound, lse, lse_bound, top, top_bound)


def attend_chunks(
    q_heads: Tensor,
    positions: Tensor,
    table: Tensor,
    rows: Rows,
    sinks: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
    q_norm_eps: float | None = None,
    *,
    bounds: bool = True,
    sums_rounded_p: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[tuple[slice, Attended]]:
    """:func:`attend` as (slice of tokens, result) chunks whose working memory is about
    ``chunk_bytes``.

    The first chunk is one token: it tells how many rows a token has.
    """
    start, step = 0, 1
    while start < len(q_heads):
        part = slice(start, min(start + step, len(q_heads)))
        values, valid = rows(part)
        yield (
            part,
            _attend_chunk(
                q_heads[part],
                table[positions[part].long()],
                values,
                valid,
                sinks,
                scale,
                dtype,
                q_norm_eps,
                bounds,
                sums_rounded_p,
            ),
        )
        start = part.stop
        width = _bytes_per_token(q_heads.shape[1], values.shape[1], dtype)
        step = max(1, chunk_bytes // width)


def attend(
    q_heads: Tensor,
    positions: Tensor,
    table: Tensor,
    rows: Rows,
    sinks: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
    q_norm_eps: float | None = None,
    *,
    bounds: bool = True,
    sums_rounded_p: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Attended:
    """Attention of every token over its own rows.

    ``q_heads`` bf16 ``[T, H, 512]`` un-roped, natural order; ``positions [T]`` index ``table`` fp32
    ``[P, 64]``; ``rows`` as in :mod:`reference.rows` (duplicates count twice); ``sinks`` fp32
    ``[H]``; ``scale`` the softmax scale. With ``q_norm_eps`` scores are also scaled by
    rsqrt(mean(q²) + eps) of the un-roped q. ``bounds=False`` leaves the bounds zero-dim zeros and
    saves a third of the work; ``sums_rounded_p`` widens them by 2^-8 · |o| (and 2^-8 on lse) for an
    implementation that normalizes by the sum of its *rounded* probabilities.
    """
    heads, dim = q_heads.shape[1:]
    tokens, device = len(q_heads), q_heads.device

    def room(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    out = Attended(
        room(tokens, heads, dim),
        room(*((tokens, heads, dim) if bounds else ()), kind=torch.float32),
        room(tokens, heads),
        room(*((tokens, heads) if bounds else ()), kind=torch.float32),
        room(tokens, heads),
        room(*((tokens, heads) if bounds else ()), kind=torch.float32),
    )
    for part, chunk in attend_chunks(
        q_heads,
        positions,
        table,
        rows,
        sinks,
        scale,
        dtype,
        q_norm_eps,
        bounds=bounds,
        sums_rounded_p=sums_rounded_p,
        chunk_bytes=chunk_bytes,
    ):
        for whole, piece in zip(out, chunk, strict=True):
            if whole.dim():
                whole[part] = piece
    return out
