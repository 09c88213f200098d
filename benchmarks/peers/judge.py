"""What an arm must compute, and how far from it it may be: nothing is timed before it is right.

Every attention arm is compared after the inverse RoPE, in natural head order, with golden attention
in float64 of the same rows. Allowed, per element: golden's own bound (bf16 probabilities, fp32
sums) and the rounding of the arm's output:

- bf16: 2^-8 of the value, of both values of a pair where RoPE mixes them;
- FP8: half a step of e4m3, 2^-4 of the value or 2^-10 of the largest scale the block may have.

A product is compared with float64 of its operands. Allowed: golden's bound for fp32 sums and 2^-8
for the bf16 result. DeepGEMM sums e4m3 products in the tensor core, which keeps about 13 bits of a
sum, four times before each promotion to fp32: 2^-11 of the sum of magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megabench.backends.arguments import DecodeArguments, PrefillArguments
from megabench.formats import NOPE_DIM, QUANT_GROUP
from megabench.quant import AMAX_FLOOR, E4M3_MAX
from reference.attention import Attended, attend
from reference.bounds import block_norms, gamma
from reference.codes import decode_e4m3, decode_ue8m0
from reference.layouts import heads_from_padded_q, output_meaning
from reference.rope import on_rope_dims, unrotate
from reference.rows import Paged, Rows, paged_rows, workspace_rows

BF16_STEP, E4M3_STEP, E4M3_SUBNORMAL = 2.0**-8, 2.0**-4, 2.0**-10
FP8_SUM = 2.0**-11
STEP_DISTANCE = 0.06
"""Of a whole step: the norm of the difference over that of an eager step. Where the output was bf16
before its cast, about one code in twenty lies on the other side of a rounding, 2^-3 of its value
away: 0.03 of the norm."""

Result = list[torch.Tensor]


@dataclass(frozen=True)
class Truth:
    """Values [..., n] float64 and what may be missing from them, per element."""

    value: torch.Tensor
    allowed: torch.Tensor

    def problem(self, got: torch.Tensor) -> str | None:
        """None when `got` is right, else where and by how much it is not."""
        if got.shape != self.value.shape:
            return f"shape {list(got.shape)}, expected {list(self.value.shape)}"
        off = (got.double() - self.value).abs()
        wrong = ~(off <= self.allowed)
        if not wrong.any():
            return None
        worst = torch.where(wrong, off / self.allowed, 0).nan_to_num(float("inf"))
        at = [int(i) for i in torch.unravel_index(worst.argmax(), worst.shape)]
        share = wrong.double().mean().item()
        return (
            f"{share:.2%} of the values are off; the worst, {at}, by {off[tuple(at)]:.3g} where "
            f"{self.allowed[tuple(at)]:.3g} is allowed"
        )


@dataclass(frozen=True)
class Distant:
    """A whole step's output, judged by its distance from an eager step's."""

    value: torch.Tensor

    def problem(self, got: torch.Tensor) -> str | None:
        want = self.value.double()
        distance = ((got.double() - want).norm() / want.norm()).item()
        if distance <= STEP_DISTANCE:
            return None
        return f"{distance:.3g} of the norm away from an eager step; {STEP_DISTANCE} is allowed"


@dataclass(frozen=True)
class AttentionTruth:
    """Golden attention of one call, and each kind of output that may stand for it."""

    golden: Attended
    cos_sin: torch.Tensor
    """float32 [T, 1, 64]"""

    def bf16(self) -> Truth:
        """Of a bf16 output before the inverse RoPE, read by `plain`."""
        return Truth(self.golden.o, self._bf16_bound())

    def fp8(self, rounded: bool = False) -> Truth:
        """Of codes and scales, read by `fused`; `rounded` when o went through bf16 before."""
        bound = self._bf16_bound() if rounded else self.golden.bound.double()
        reach = self.golden.o.abs() + bound
        amax = torch.unflatten(reach, -1, (-1, QUANT_GROUP)).amax(-1).clamp_min(AMAX_FLOOR)
        scale = (amax * 2 / E4M3_MAX).repeat_interleave(QUANT_GROUP, -1)
        return Truth(self.golden.o, bound + E4M3_STEP * reach + E4M3_SUBNORMAL * scale)

    def plain(self, result: Result) -> torch.Tensor:
        o = result[0].double()
        return on_rope_dims(o, unrotate(o[..., NOPE_DIM:], self.cos_sin))

    def fused(self, result: Result) -> torch.Tensor:
        codes, scales = output_meaning(result[0], result[1])
        factors = decode_ue8m0(scales).double().repeat_interleave(QUANT_GROUP, -1)
        return decode_e4m3(codes).double() * factors

    def _bf16_bound(self) -> torch.Tensor:
        o = self.golden.o.abs()
        pair = torch.unflatten(o[..., NOPE_DIM:], -1, (-1, 2)).sum(-1, keepdim=True)
        reach = on_rope_dims(o, pair.expand(*pair.shape[:-1], 2).flatten(-2))
        return self.golden.bound.double() + BF16_STEP * reach


def decode_rows(args: DecodeArguments) -> Rows:
    """The rows a decode call names; interleaved pages, lengths given."""
    assert args.topk_length is not None
    parts = [Paged(args.kv, args.indices, args.topk_length)]
    if args.extra_kv is not None:
        assert args.extra_indices is not None
        assert args.extra_topk_length is not None
        parts.append(Paged(args.extra_kv, args.extra_indices, args.extra_topk_length))
    return paged_rows(parts)


def attention_truth(args: DecodeArguments | PrefillArguments) -> AttentionTruth:
    """Golden float64 attention of a call."""
    if isinstance(args, DecodeArguments):
        rows = decode_rows(args)
    else:
        rows = workspace_rows(args.kv, args.indices, args.topk_length)
    assert args.attn_sink is not None
    golden = attend(
        heads_from_padded_q(args.q, args.q.shape[1]),
        args.token_positions,
        args.cos_sin_cache,
        rows,
        args.attn_sink,
        args.sm_scale,
        torch.float64,
        sums_rounded_p=True,
    )
    return AttentionTruth(golden, args.cos_sin_cache[args.token_positions.long()][:, None])


def product_truth(x: torch.Tensor, w: torch.Tensor, fp8_sums: bool = False) -> Truth:
    """z [b, h, d] of x [b, h, r] and w [h, d, r], dequantized."""
    grouped = x.double().transpose(0, 1)
    value = torch.bmm(grouped, w.double().transpose(1, 2)).transpose(0, 1)
    norms = torch.bmm(block_norms(grouped), block_norms(w.float()).transpose(1, 2))
    share = gamma(x.shape[-1]) + (FP8_SUM if fp8_sums else 0.0)
    allowed = share * norms.transpose(0, 1).double() + BF16_STEP * value.abs()
    return Truth(value, allowed)


def first(result: Result) -> torch.Tensor:
    """The one tensor an arm returned."""
    return result[0]


Read = Callable[[Result], torch.Tensor]
