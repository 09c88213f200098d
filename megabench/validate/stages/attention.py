"""Attention's results: lse, max_logits, scale bytes, codes, and the direction codes are rounded in.

Golden attention starts from production's padded Q and cache bytes, and from golden's own lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megabench.validate.judgement import (
    TOKEN_HEAD,
    TOKEN_HEAD_DIM,
    Judgement,
    judge_ratio,
    merge,
    outside,
    ratio_of,
)
from megabench.validate.stages.evidence import Evidence, UnobservedError, missing
from megabench.validate.stages.query import query_heads
from megabench.validate.trace import DECODE, PREFILL
from reference.attention import Attended, attend_chunks
from reference.codes import decode_ue8m0, e4m3_interval
from reference.quantize import block_amax, scale_exponent
from reference.rows import Paged, paged_rows

ROUNDING = "rounding_direction"
ZERO_BLOCK = 105
"""Scale byte of an all-zero block."""
BLOCK = 32
SIGN_IMBALANCE, SIGN_DEVIATIONS = 0.1, 8.0
"""The sign test fails when |up - down| / (up + down) and its z-score both exceed these."""


@dataclass(frozen=True)
class Slice:
    """Some tokens of one phase: what was written for them, and golden's attention of them."""

    phase: str
    first: int
    codes: Tensor
    scales: Tensor
    lse: Tensor | None
    """Of all `padded_heads`, as is `max_logits`."""
    max_logits: Tensor | None
    golden: Attended
    valid: Tensor
    padded_heads: int


def attention(evidence: Evidence) -> list[Judgement]:
    """lse, max_logits, output scales and codes of each phase, padding tokens, rounding."""
    try:
        found = merge(j for part in _slices(evidence) for j in judge_slice(part))
    except UnobservedError as why:
        return [missing("output_codes", why)]
    return sorted(found, key=lambda judgement: judgement.stage == ROUNDING)


def _returned(evidence: Evidence, phase: str) -> tuple[Tensor, Tensor | None]:
    """lse and max_logits [t, padded heads] of a phase; decode has no max_logits."""
    if phase == "decode":
        return evidence.call(DECODE).results[2], None
    calls = evidence.calls(PREFILL, len(evidence.truth.chunks))
    logits, lse = (torch.cat([call.results[i] for call in calls]) for i in (2, 3))
    return lse, logits


def parts_of(evidence: Evidence, tokens: slice) -> list[Paged]:
    """The cache rows that some tokens attend to, as production left the caches."""
    truth = evidence.truth
    swa = truth.swa_selected
    parts = [Paged(evidence.swa_after, swa.slots[tokens], swa.lens[tokens], truth.layout)]
    if truth.compressed_selected is not None:
        slots, lens = truth.compressed_selected
        cache = evidence.compressed_after
        parts.append(Paged(cache, slots[tokens], lens[tokens], truth.layout))
    return parts


def _slices(evidence: Evidence) -> Iterator[Slice]:
    """Token chunks of each phase, so that golden's working memory stays bounded."""
    truth = evidence.truth
    q = query_heads(evidence)
    codes, scales = evidence.output
    for phase, tokens in truth.phases().items():
        lse, logits = _returned(evidence, phase)
        for chunk, golden in attend_chunks(
            q[tokens],
            truth.tokens.position[tokens],
            evidence.table,
            paged_rows(parts_of(evidence, tokens)),
            evidence.weights.sinks,
            truth.model.softmax_scale,
            evidence.dtype,
            sums_rounded_p=evidence.sums_rounded_p,
        ):
            here = slice(tokens.start + chunk.start, tokens.start + chunk.stop)
            yield Slice(
                phase,
                here.start,
                codes[here],
                scales[here],
                lse[chunk],
                None if logits is None else logits[chunk],
                golden,
                truth.tokens.valid[here],
                evidence.run.layer.padded_heads,
            )


def judge_slice(part: Slice) -> Iterable[Judgement]:
    golden, phase = part.golden, part.phase
    if part.lse is not None:
        yield _judge_logs(f"lse_{phase}", part, part.lse, golden.lse, golden.lse_bound)
    if part.max_logits is not None:
        yield _judge_logs(
            "max_logits", part, part.max_logits, golden.max_logits, golden.max_logits_bound
        )
    yield _judge_scales(part)
    yield from _judge_codes(part)
    if not bool(part.valid.all()):
        yield from _judge_padding(part)


def _judge_logs(stage: str, part: Slice, got: Tensor, golden: Tensor, bound: Tensor) -> Judgement:
    """Infinities (no valid row) exactly, everything else within its bound."""
    wanted = [len(golden), part.padded_heads]
    if got.dtype != torch.float32 or list(got.shape) != wanted:
        given = f"{got.dtype} {list(got.shape)}"
        return Judgement(stage, problem=f"{given}, expected torch.float32 {wanted}")
    got = got[:, : golden.shape[1]]
    error = torch.where(got == golden, 0.0, (got - golden).abs())
    return judge_ratio(
        stage,
        ratio_of(error, bound),
        TOKEN_HEAD,
        None,
        (part.first,),
        got=got,
        golden=golden,
        bound=bound,
    )


def _judge_scales(part: Slice) -> Judgement:
    """A scale byte must be that of some amax in [amax - b, amax + b]."""
    o, bound = part.golden.o, part.golden.bound
    least = block_amax((o.abs() - bound).clamp(min=0), BLOCK)
    most = block_amax(o.abs() + bound, BLOCK)
    low, high = scale_exponent(least).int(), scale_exponent(most).int()
    got = part.scales.int()
    ratio = torch.where((got >= low) & (got <= high), 0.0, math.inf)
    ambiguous = int(((low != high) & part.valid[:, None, None]).sum())
    return judge_ratio(
        f"output_scales_{part.phase}",
        ratio,
        ("token", "head", "block"),
        part.valid,
        (part.first,),
        {"ambiguous": ambiguous},
        got=got,
        golden_low=low,
        golden_high=high,
    )


def _judge_codes(part: Slice) -> Iterable[Judgement]:
    """A code's rounding interval at its own binade, under the scale written, widened by the bound,
    must contain golden's value. Codes on either side of it are counted for the sign test."""
    o, bound = part.golden.o, part.golden.bound
    scale = decode_ue8m0(part.scales, o.dtype).repeat_interleave(BLOCK, -1)
    low, high = (end * scale for end in e4m3_interval(part.codes, o.dtype))
    ratio = ratio_of(outside(o, low, high), bound)
    yield judge_ratio(
        f"output_codes_{part.phase}",
        ratio,
        TOKEN_HEAD_DIM,
        part.valid,
        (part.first,),
        got_low=low,
        got_high=high,
        code=part.codes,
        golden=o,
        bound=bound,
    )
    yield _count_directions(part, o, low, high)


def _count_directions(part: Slice, o: Tensor, low: Tensor, high: Tensor) -> Judgement:
    """Codes that are not golden's own cast, by direction: sums of +1 and -1 in all, within each
    head of a token (their squares), and within each dim."""
    live = part.valid[:, None, None]
    up = ((o < low) & live).int() - ((o > high) & live).int()
    sums, tallies = {"differ": up.abs().sum()}, {}
    for name, direction in (("up", up), ("outward", up * o.sign().int())):
        sums[name] = direction.sum()
        sums[f"{name}_squares"] = direction.sum(-1).square().sum()
        tallies[name] = direction.sum((0, 1))
    values = torch.stack([*sums.values()]).tolist()
    counts = dict(zip(sums, values, strict=True))
    return Judgement(ROUNDING, counts["differ"], counts=counts, tallies=tallies)


def _judge_padding(part: Slice) -> Iterable[Judgement]:
    """Padding tokens of a step: zero codes, the zero block's byte, no lse."""
    masked = ~part.valid
    zero = torch.where((part.codes & 0x7F) == 0, 0.0, math.inf)
    byte = torch.where(part.scales == ZERO_BLOCK, 0.0, math.inf)
    first = (part.first,)
    yield judge_ratio("padding_tokens", zero, TOKEN_HEAD_DIM, masked, first, code=part.codes)
    yield judge_ratio(
        "padding_tokens", byte, ("token", "head", "block"), masked, first, byte=part.scales
    )


def sign_test(rounding: Judgement) -> Judgement:
    """rounding_direction: codes that differ from golden's own cast must not lean one way.

    Judged on the sum over ranks, both upwards (rounding towards an infinity) and away from zero
    (truncation). Codes are not witnesses of their own: where a head's values are alike, so are
    their errors, and where heads weigh the keys alike, so are the errors of a dim. The lean must
    be beyond chance whether heads of tokens or dims are counted.
    """
    counts = rounding.counts
    worst, lean = 0.0, ""
    for name, by_dim in rounding.tallies.items():
        imbalance = abs(counts[name])
        squares = max(counts[f"{name}_squares"], int(by_dim.long().square().sum()))
        if squares and imbalance / math.sqrt(squares) > SIGN_DEVIATIONS:
            share = imbalance / counts["differ"] / SIGN_IMBALANCE
            worst, lean = max((worst, lean), (share, name))
    failed = int(worst > 1)
    where = {"lean": lean} if failed else {}
    return Judgement(ROUNDING, rounding.checked, failed, worst, where, dict(counts))
