"""Results without room for rounding: one valid key, or a power of two of equally weighted ones.

There attention is a mean that float32 holds exactly, so codes and scale bytes are golden's own and
a bound would only hide one rounding too many. What rounds is the inverse RoPE, and, where several
keys are combined, whatever sums and divides them: a value that near a tie may go either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megabench.validate.judgement import TOKEN_HEAD_DIM, Judgement, judge_ratio, merge
from megabench.validate.stages.attention import BLOCK, parts_of
from megabench.validate.stages.evidence import Evidence, UnobservedError, missing
from megabench.validate.stages.query import query_heads
from reference.quantize import block_amax, mxfp8_codes, scale_exponent
from reference.rope import FP32_SLACK, ROPE_DIM, on_rope_dims, rotated_magnitude, unrotate
from reference.rows import paged_rows

STAGE = "exact_output"
_TOKENS_AT_A_TIME = 16
_FP32_BITS = 24


def exact_output(evidence: Evidence) -> Judgement:
    """exact_output: codes and scale bytes, bit for bit, of every head whose result is exact: a sink
    of -inf (or +inf, whose result is zero), and equal scores of 2^k keys."""
    try:
        q = query_heads(evidence)
        codes, scales = evidence.output
        sinks = evidence.weights.sinks
        if not bool(sinks.isinf().any()):
            return Judgement(STAGE)
        rows = paged_rows(parts_of(evidence, slice(0, evidence.truth.num_tokens)))
    except UnobservedError as why:
        return missing(STAGE, why)
    flat = (q == 0).all(-1)
    found = [Judgement(STAGE)]
    for start in range(0, len(q), _TOKENS_AT_A_TIME):
        part = slice(start, min(start + _TOKENS_AT_A_TIME, len(q)))
        values, valid = rows(part)
        count = valid.sum(-1)
        power = (count & (count - 1) == 0) & (count > 0)
        heads = power[:, None] & (flat[part] | (count == 1)[:, None]) & sinks.isinf()
        if bool(heads.any()):
            kept = torch.where(valid[..., None], values.double(), 0.0)
            cos_sin = evidence.table[evidence.truth.tokens.position[part]].double()
            exact, slack, holds = _means(kept, count, cos_sin)
            live = (sinks < 0).double()[:, None]
            found += _judge(
                start,
                codes[part],
                scales[part],
                exact[:, None] * live,
                slack[:, None] * live,
                heads[..., None] & holds[:, None],
            )
    return merge(found)[0]


def _means(rows: Tensor, count: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean rows after inverse RoPE, float64 ``[t, 512]``, what float32 may be off, and in which
    blocks ``[t, 16]`` no order of summation rounds."""
    n = count.clamp(min=1)[:, None]
    mean, size = rows.sum(1) / n, rows.abs().sum(1) / n
    slack = torch.where(n > 1, FP32_SLACK * size, 0.0)
    rounds = cos_sin[:, ROPE_DIM // 2 :].repeat_interleave(2, -1) != 0
    turned = rotated_magnitude(slack[:, -ROPE_DIM:], cos_sin)
    turned += FP32_SLACK * rounds * rotated_magnitude(mean[:, -ROPE_DIM:], cos_sin)
    exact = on_rope_dims(mean, unrotate(mean[:, -ROPE_DIM:], cos_sin))
    holds = size * n < 2.0**_FP32_BITS * _least_bit(rows).amin(1)
    return exact, on_rope_dims(slack, turned), torch.unflatten(holds, -1, (-1, BLOCK)).all(-1)


def _least_bit(x: Tensor) -> Tensor:
    """The value of the lowest set significand bit of each float64 that is a bf16; inf for 0."""
    mantissa, exponent = torch.frexp(x)
    whole = (mantissa.abs() * 256).long()
    least = (whole & -whole).double() * torch.exp2(exponent.double() - 8)
    return torch.where(x == 0, math.inf, least)


def _judge(
    first: int, codes: Tensor, scales: Tensor, exact: Tensor, slack: Tensor, mask: Tensor
) -> Iterable[Judgement]:
    """Codes and scales `[t, H, ...]` against values `[t, H, 512]`, in the blocks of `mask`."""
    low, high = (exact - slack).float(), (exact + slack).float()
    least = scale_exponent(block_amax((exact.abs() - slack).clamp(min=0).float(), BLOCK))
    most = scale_exponent(block_amax((exact.abs() + slack).float(), BLOCK))
    wrong = (scales != least) & (scales != most)
    yield judge_ratio(
        STAGE,
        torch.where(wrong, math.inf, 0.0),
        ("token", "head", "block"),
        mask,
        (first,),
        byte=scales,
        golden_low=least,
        golden_high=most,
    )
    wanted = mxfp8_codes(low, scales), mxfp8_codes(high, scales)
    wrong = (codes != wanted[0]) & (codes != wanted[1])
    wrong &= ((codes & 0x7F) != 0) | (exact != 0)
    yield judge_ratio(
        STAGE,
        torch.where(wrong, math.inf, 0.0),
        TOKEN_HEAD_DIM,
        mask.repeat_interleave(BLOCK, -1),
        (first,),
        code=codes,
        golden_low=wanted[0],
        golden_high=wanted[1],
        golden=exact,
    )
