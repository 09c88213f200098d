"""After attention: the grouped wo_a, wo_b, the layer's output, and the sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megabench.validate.judgement import Judgement, judge_bf16, judge_equal, judge_ratio, ratio_of
from megabench.validate.stages.evidence import Evidence, UnobservedError, missing
from megabench.validate.trace import EINSUM, LINEAR
from reference import linear as golden
from reference.bounds import BF16_ROUNDOFF
from reference.linear import Weight

TOKEN_COLUMN = ("token", "column")


def wo_a(evidence: Evidence) -> Judgement:
    """wo_a_einsum: the live groups' output codes, as written, times wo_a in standard order."""
    stage = "wo_a_einsum"
    try:
        got = evidence.call(EINSUM).after["out"]
        codes, scales = evidence.output
    except UnobservedError as why:
        return missing(stage, why)
    value, bound = golden.wo_a(codes, scales, evidence.weights.wo_a)
    return judge_bf16(stage, got, value, bound, ("token", "group", "column"))


def latent(evidence: Evidence) -> Tensor:
    """z bf16 [T, G * d]: what the einsum wrote."""
    return evidence.call(EINSUM).after["out"].flatten(1)


def wo_b(evidence: Evidence) -> Judgement:
    """wo_b_linear: from the einsum's own result."""
    stage = "wo_b_linear"
    try:
        got = evidence.calls(LINEAR, 2)[1].results[0]
        value, bound = golden.linear(latent(evidence), evidence.weights.wo_b)
    except UnobservedError as why:
        return missing(stage, why)
    return judge_bf16(stage, got, value, bound, TOKEN_COLUMN)


def layer_output(evidence: Evidence) -> Judgement:
    """layer_output: what the layer returned is what wo_b made."""
    try:
        made = evidence.calls(LINEAR, 2)[1].results[0]
    except UnobservedError as why:
        return missing("layer_output", why)
    return judge_equal("layer_output", evidence.run.output, made, TOKEN_COLUMN)


def tp_sum(latents: Sequence[Tensor], outputs: Sequence[Tensor], wo_b: Weight) -> Judgement:
    """tp_sum: ranks' outputs, summed exactly, against the unsharded wo_b over all ranks' z.

    Each rank's own rounding to bf16 adds 2^-8 of its summand to the bound.
    """
    value, bound = golden.linear(torch.cat(list(latents), 1), wo_b)
    stacked = torch.stack([output.double() for output in outputs])
    allowed = bound + BF16_ROUNDOFF * stacked.abs().sum(0)
    total = stacked.sum(0)
    ratio = ratio_of((total - value).abs(), allowed)
    return judge_ratio("tp_sum", ratio, TOKEN_COLUMN, got=total, golden=value, bound=allowed)
