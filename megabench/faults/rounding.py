"""One rounding too many, one too few, or another one: what a bound of 2^-8 may well forgive.

Exact families show most of them (a single key, 2^k equally weighted keys), the sign test those that
lean one way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megabench.faults.base import Args, fault
from megabench.faults.kernel import Kernel, Pair, kernel
from megabench.faults.output import Scaled, exponents
from megabench.faults.triggers import EDGE, EQUAL, FEW, MANY, MIXED, TWO
from megabench.quant import AMAX_FLOOR, decode_e4m3, encode_e4m3


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def truncated_bf16(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)


@fault("V1", "the output is rounded to bf16 before the inverse rotation", EQUAL, "exact_output")
@kernel
class Bf16BeforeRotation(Kernel):
    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        return super().turned_back(to_bf16(out), angles)


@fault("V2", "the output is rounded to bf16 after the inverse rotation", EQUAL, "exact_output")
@kernel
class Bf16AfterRotation(Kernel):
    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        return to_bf16(super().turned_back(out, angles))


@fault("V3", "the inverse rotation uses a bf16 table", EQUAL, "exact_output")
@kernel
class Bf16TableOfTheOutput(Kernel):
    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        return super().turned_back(out, (to_bf16(angles[0]), to_bf16(angles[1])))


@fault("V4", "Q's rotation uses a bf16 table", MIXED, "max_logits", "holed_lists")
@kernel
class Bf16TableOfTheQuery(Kernel):
    def rotated_query(self, q: Tensor, angles: Pair) -> Tensor:
        return super().rotated_query(q, (to_bf16(angles[0]), to_bf16(angles[1])))


@fault("V5", "RoPE'd Q is not rounded to bf16", MIXED, "max_logits", "holed_lists")
@kernel
class QueryNotRounded(Kernel):
    def rotated_query(self, q: Tensor, angles: Pair) -> Tensor:
        return self.turned(q, angles)


@fault("V6", "RoPE'd Q is truncated to bf16", MIXED, "lse_decode", "lse_prefill")
@kernel
class QueryTruncated(Kernel):
    def rotated_query(self, q: Tensor, angles: Pair) -> Tensor:
        return truncated_bf16(self.turned(q, angles))


@fault("V7", "output codes are rounded through fp16", EQUAL, "exact_output")
@kernel
class ThroughFp16(Scaled):
    def encode(self, x: Tensor) -> Tensor:
        return encode_e4m3(x.half().float())


@fault("V8", "output codes are rounded through bf16", EQUAL, "exact_output")
@kernel
class ThroughBf16(Scaled):
    def encode(self, x: Tensor) -> Tensor:
        return encode_e4m3(to_bf16(x))


@fault("V9", "probabilities are truncated to bf16", MANY, "rounding_direction")
@kernel
class ProbabilitiesTruncated(Kernel):
    def probabilities(self, weights: Tensor) -> Tensor:
        return truncated_bf16(weights)


@fault(
    "V10",
    "the sum that divides the output is rounded to bf16",
    TWO,
    equivalent="It scales all probabilities of a head by one factor within 2^-8 of 1, and each of "
    "them may be that far off for being bf16 in the product: no result shows which it was.",
)
@kernel
class DivisorOfBf16(Kernel):
    def divisor(self, weights: Tensor, total: Tensor) -> Tensor:
        return to_bf16(super().divisor(weights, total))


@fault("V11", "lse is the logarithm of the sum of rounded probabilities", FEW, "lse_decode")
@kernel
class LseOfRounded(Kernel):
    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, top, _ = super().softmax(scores)
        return weights, top, to_bf16(weights).sum(-1)


@fault("V12", "lse is rounded to bf16", MIXED, "lse_decode", "lse_prefill")
@kernel
class LseOfBf16(Kernel):
    def reported_lse(self, lse: Tensor, args: Args) -> Tensor:
        return to_bf16(lse)


@fault("V13", "scores are rounded to bf16", MIXED, "lse_decode", "lse_prefill")
@kernel
class ScoresOfBf16(Kernel):
    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().softmax(to_bf16(scores))


@fault("V14", "the product of probabilities and V is summed in bf16", EQUAL, "exact_output")
@kernel
class SumsOfBf16(Kernel):
    def product(self, p: Tensor, rows: Tensor) -> Tensor:
        total = torch.zeros_like(p[..., :1]) * rows[:, :1]
        for part in range(0, rows.shape[1], 4):
            some = slice(part, part + 4)
            total = to_bf16(total + torch.bmm(p[..., some], rows[:, some]))
        return total


@fault(
    "V15",
    "ties of output codes are rounded away from zero",
    EQUAL,
    equivalent="A tie needs several keys: a single key's row is e4m3 times a power of two "
    "already. Several are summed and divided in float32, in any order, which may leave a value "
    "on either side of the tie, so that both codes are right.",
)
@kernel
class TiesAway(Scaled):
    def encode(self, x: Tensor) -> Tensor:
        codes = super().encode(x)
        middle = (decode_e4m3(codes).abs() + decode_e4m3(codes + 1).abs()) / 2
        return torch.where(x.abs() == middle, codes + 1, codes)


@fault("V17", "a block's amax is rounded to bf16 before its exponent", EDGE, "exact_output")
@kernel
class AmaxOfBf16(Scaled):
    def bytes_of(self, amax: Tensor) -> Tensor:
        return super().bytes_of(to_bf16(amax))


@fault(
    "V16",
    "a scale's exponent is the ceiling of a float32 log2",
    TWO,
    equivalent="It differs only for an amax within float32's own rounding above 448 · 2^k. There "
    "amax - b and amax + b lie on either side of the edge, so that both bytes are right.",
)
@kernel
class FloatLogarithm(Scaled):
    def bytes_of(self, amax: Tensor) -> Tensor:
        return exponents(torch.log2(amax.clamp(min=AMAX_FLOOR) / 448).ceil())
