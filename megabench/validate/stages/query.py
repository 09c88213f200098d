"""From the low-rank query to the kernel's Q: wq_b, then padding inside every chunk."""

from __future__ import annotations

from torch import Tensor

from megabench.validate.judgement import TOKEN_HEAD_DIM, Judgement, judge_bf16, judge_equal
from megabench.validate.stages.evidence import Evidence, UnobservedError, missing
from megabench.validate.trace import LINEAR, PAD_AND_INSERT
from reference.layouts import heads_from_fused_q, heads_from_padded_q, pad_q
from reference.linear import linear
from reference.records import HEAD_DIM


def wq_b(evidence: Evidence) -> Judgement:
    """wq_b_linear: the fused Q projection, read in natural head order, from the case's qr."""
    stage = "wq_b_linear"
    try:
        got = evidence.calls(LINEAR, 2)[0].results[0]
    except UnobservedError as why:
        return missing(stage, why)
    heads = evidence.run.heads
    value, bound = linear(evidence.truth.workload.qr, evidence.weights.wq_b)
    shape = (len(value), heads, HEAD_DIM)
    if got.shape != value.shape:
        return Judgement(stage, problem=f"shape {list(got.shape)}, expected {list(value.shape)}")
    return judge_bf16(
        stage,
        heads_from_fused_q(got, heads),
        value.view(shape),
        bound.view(shape),
        TOKEN_HEAD_DIM,
    )


def q_layout(evidence: Evidence) -> Judgement:
    """q_layout: production's own Q, in 32 chunks of [padded heads, 16], padding zero."""
    stage = "q_layout"
    try:
        fused = evidence.calls(LINEAR, 2)[0].results[0]
        got = evidence.call(PAD_AND_INSERT).results[0]
    except UnobservedError as why:
        return missing(stage, why)
    padded = evidence.run.layer.padded_heads
    golden = pad_q(heads_from_fused_q(fused, evidence.run.heads), padded)
    if got.shape != golden.shape:
        return Judgement(stage, problem=f"shape {list(got.shape)}, expected {list(golden.shape)}")
    got, golden = heads_from_padded_q(got, padded), heads_from_padded_q(golden, padded)
    return judge_equal(stage, got, golden, TOKEN_HEAD_DIM)


def query_heads(evidence: Evidence) -> Tensor:
    """bf16 [T, H, 512], un-roped, natural order: the live heads of production's padded Q."""
    padded = evidence.call(PAD_AND_INSERT).results[0]
    return heads_from_padded_q(padded, evidence.run.heads)
