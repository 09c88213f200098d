"""Faults of scores, softmax, sink, lse and max_logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megabench.faults.base import Args, after, fault
from megabench.faults.kernel import Kernel, kernel
from megabench.faults.triggers import DISTANT, EQUAL, FEW, IDLE, INFINITE, MANY, MIXED, TWO
from megabench.validate.trace import PREFILL

TILE = 64
LOG2_E = math.log2(math.e)
SUNK = ("output_codes_decode",)
"""A wrong sink changes the output alone."""


def _tiles(args: Args) -> int:
    extra = args.get("extra_indices")
    width = args["indices"].shape[-1] + (0 if extra is None else extra.shape[-1])
    return int(-(-width // TILE))


class Sunk(Kernel):
    """A kernel whose sink weighs `share`, over the keys' 1, in each head."""

    args: Args

    def scale(self, args: Args) -> float:
        self.args = args
        return super().scale(args)

    def share(self, sink: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(sink - lse)

    def sink_factor(self, sink: Tensor, lse: Tensor) -> Tensor:
        return 1 / (1 + self.share(sink, lse))


@fault("S1", "the sink is added once a tile of 64 rows", TWO, *SUNK)
@kernel
class SinkOfEveryTile(Sunk):
    def share(self, sink: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(sink - lse) * _tiles(self.args)


@fault("S2", "the sink is multiplied by log2(e) twice", TWO, *SUNK)
@kernel
class SinkOfTwoBases(Sunk):
    def share(self, sink: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(sink * LOG2_E - lse)


@fault("S3", "lse includes the sink", MIXED, "lse_decode", "lse_prefill")
@kernel
class SinkInLse(Sunk):
    def reported_lse(self, lse: Tensor, args: Args) -> Tensor:
        return torch.logaddexp(lse, args["attn_sink"])


@fault("S4", "head h takes the sink of head h + 8", TWO, *SUNK)
@kernel
class SinkOfAnotherHead(Sunk):
    def share(self, sink: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(sink.roll(-8) - lse)


@fault("S5a", "a sink of +inf gives NaN", INFINITE, *SUNK)
@kernel
class InfiniteSinkIsNan(Sunk):
    def sink_factor(self, sink: Tensor, lse: Tensor) -> Tensor:
        top = torch.maximum(sink.expand_as(lse), lse)
        return torch.exp(lse - top) / (torch.exp(lse - top) + torch.exp(sink - top))


@fault("S5b", "a sink of -inf counts as 0", EQUAL, *SUNK)
@kernel
class NoSinkIsZero(Sunk):
    def share(self, sink: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(torch.where(sink == -math.inf, 0.0, sink) - lse)


@fault("S6a", "a token without a row has lse -inf", IDLE, "lse_decode")
@kernel
class EmptyLseIsMinusInfinity(Kernel):
    def reported_lse(self, lse: Tensor, args: Args) -> Tensor:
        return torch.where(lse == math.inf, -math.inf, lse)


@fault("S6b", "a token without a row has the mean of V", IDLE, "padding_tokens")
@kernel
class EmptyIsTheMean(Kernel):
    def empty_rows(self, out: Tensor, top: Tensor, args: Args) -> Tensor:
        pool = args["kv"].shape[0] * args["kv"].shape[1]
        slots = args["indices"].long() % pool
        mean = torch.nan_to_num(self.read(args["kv"], slots)).mean(1)
        return torch.where(top.isinf()[..., None], mean[:, None], out)


@fault("S7", "lse is in units of log2", MIXED, "lse_decode", "lse_prefill")
@kernel
class LseOfBaseTwo(Kernel):
    def reported_lse(self, lse: Tensor, args: Args) -> Tensor:
        return lse * LOG2_E


@fault("S8", "the softmax scale is that of 576 dims", MIXED, "lse_decode", "lse_prefill")
@kernel
class ScaleOf576(Kernel):
    def scale(self, args: Args) -> float:
        return float(576**-0.5)


@fault("S9", "a first tile without a valid row leaves its maximum at -inf", MIXED, "holed_lists")
@kernel
class FirstTileOfMinusInfinity(Kernel):
    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, top, total = super().softmax(scores)
        first = scores[..., :TILE].amax(-1)
        rescale = torch.where(first.isinf() & ~top.isinf(), math.nan, 1.0)
        return weights, top, total * rescale


@fault("S10", "probabilities are rounded to e4m3", FEW, *SUNK)
@kernel
class ProbabilitiesOfFp8(Kernel):
    def probabilities(self, weights: Tensor) -> Tensor:
        return weights.to(torch.float8_e4m3fn).float()


@fault("S11", "the sink is left out", TWO, *SUNK)
@kernel
class NoSink(Kernel):
    def sink_factor(self, sink: Tensor, lse: Tensor) -> Tensor:
        return torch.ones_like(lse)


@fault("S12", "max_logits are in units of log2", MIXED, "max_logits")
@after(PREFILL)
def max_logits_of_base_two(args: Args, result: Any) -> Any:
    return [*result[:2], result[2] * LOG2_E, result[3]]


@fault("S13", "the sink is 2^-7 too large", MANY, "rounding_direction")
@kernel
class SinkALittleLarge(Sunk):
    def share(self, sink: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(sink + 2.0**-7 - lse)


@fault("S14", "scores are of Q before its rotation", MIXED, "lse_decode", "lse_prefill")
@kernel
class QueryNotRotated(Kernel):
    def rotated_query(self, q: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return q.float()


@fault(
    "S15",
    "the largest score is taken of the first tile alone, not of all rows",
    MIXED,
    "max_logits",
)
@kernel
class FirstTilesMaximum(Kernel):
    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, _, total = super().softmax(scores)
        top = scores[..., :TILE].amax(-1)
        return weights, top, total


@fault("S16", "the running maximum starts at -10^4, not at -inf", DISTANT, "lse_decode")
@kernel
class MaximumOfAtLeastMinusTenThousand(Kernel):
    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = scores.amax(-1)
        top = torch.where(top.isinf(), top, top.clamp(min=-1e4))
        weights = torch.exp(scores - torch.where(top.isinf(), 0.0, top)[..., None])
        return weights, top, weights.sum(-1)
