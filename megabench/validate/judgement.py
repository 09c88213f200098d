"""Verdicts on tensors: equality, and rounding intervals that a bound may widen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megabench.reasons import reason_of
from megabench.results.schema import StageResult

Axes = tuple[str, ...]
Mask = tuple[str, Callable[[], Tensor]]
"""A name, and what makes the bool tensor of elements that are wrong."""
TOKEN_HEAD: Axes = ("token", "head")
TOKEN_HEAD_DIM: Axes = ("token", "head", "dim")


@dataclass(frozen=True)
class Judgement:
    """What judging one stage of one rank found. `worst` is error / bound; beyond 1 is wrong."""

    stage: str
    checked: int = 0
    failed: int = 0
    worst: float = 0.0
    where: dict[str, Any] = field(default_factory=dict)
    """The worst element: its place, what was written, golden's value, the bound."""
    counts: dict[str, int] = field(default_factory=dict)
    """Legal but notable, e.g. ambiguous scale bytes."""
    tallies: dict[str, Tensor] = field(default_factory=dict)
    """Sums over all that was checked, kept for a verdict on the whole; not reported."""
    problem: str = ""
    """Why the stage could not be judged element by element; a failure."""
    verdict: bool = True
    """False when the stage only reports."""
    note: str = ""
    """What a reader should know of how it was judged."""

    @property
    def ok(self) -> bool:
        return not self.verdict or not (self.failed or self.problem)

    def at(self, **place: Any) -> Judgement:
        """With more said about where the worst element is."""
        return replace(self, where={**place, **self.where}) if self.where else self

    def result(self) -> StageResult:
        """As a row of the run."""
        detail: dict[str, Any] = {**self.counts}
        detail |= {"worst_element": self.where} if self.where else {}
        detail |= {"note": self.note} if self.note else {}
        return StageResult(
            name=self.stage,
            ok=self.ok,
            checked=self.checked,
            worst=self.worst if self.verdict else None,
            message=self._message() if self.failed or self.problem else "",
            verdict=self.verdict,
            detail=detail,
        )

    def _message(self) -> str:
        if self.problem:
            return self.problem
        place = ", ".join(f"{key} {value}" for key, value in self.where.items())
        return f"{self.failed} of {self.checked} wrong; worst at {place}"


def merge(judgements: Iterable[Judgement]) -> list[Judgement]:
    """One judgement a stage, in order of first appearance."""
    merged: dict[str, Judgement] = {}
    for new in judgements:
        old = merged.get(new.stage)
        merged[new.stage] = new if old is None else _both(old, new)
    return list(merged.values())


def _both(a: Judgement, b: Judgement) -> Judgement:
    counts = {key: a.counts.get(key, 0) + b.counts.get(key, 0) for key in {**a.counts, **b.counts}}
    return Judgement(
        a.stage,
        a.checked + b.checked,
        a.failed + b.failed,
        max(a.worst, b.worst),
        b.where if b.worst > a.worst or not a.where else a.where,
        counts,
        _added(a.tallies, b.tallies),
        a.problem or b.problem,
        a.verdict and b.verdict,
        a.note or b.note,
    )


def _added(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**a, **{key: a[key] + value if key in a else value for key, value in b.items()}}


def bits_of(tensor: Tensor) -> Tensor:
    """Floats as integers of their width, so that equality means the same bits; integers as is."""
    if not tensor.is_floating_point():
        return tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def judge_equal(
    stage: str,
    got: Tensor,
    golden: Tensor,
    axes: Axes,
    mask: Tensor | None = None,
    first: Sequence[int] = (),
) -> Judgement:
    """Exact stages: every element bit for bit, where `mask` (broadcast) holds."""
    if got.shape != golden.shape:
        return Judgement(stage, problem=f"shape {list(got.shape)}, expected {list(golden.shape)}")
    if got.dtype != golden.dtype:
        return Judgement(stage, problem=f"{got.dtype}, expected {golden.dtype}")
    wrong = bits_of(got) != bits_of(golden)
    if mask is not None:
        mask = _over(mask, wrong)
        wrong = wrong & mask
    wanted = [wrong.any()] if mask is None else [wrong.any(), mask.sum()]
    flag, *rest = _numbers(*wanted)
    if not flag:
        return Judgement(stage, int(rest[0]) if rest else wrong.numel())
    ratio = torch.where(wrong, math.inf, 0.0)
    return judge_ratio(stage, ratio, axes, mask, first, got=got, golden=golden)


def _over(mask: Tensor, values: Tensor) -> Tensor:
    """A mask of the leading axes, seen over all axes of some values."""
    return mask.reshape(mask.shape + (1,) * (values.dim() - mask.dim())).expand(values.shape)


def judge_ratio(
    stage: str,
    ratio: Tensor,
    axes: Axes,
    mask: Tensor | None = None,
    first: Sequence[int] = (),
    counts: dict[str, int] | None = None,
    **values: Tensor,
) -> Judgement:
    """Bounded stages: error / bound of every element must not exceed 1.

    `first` is the index of element 0 along each leading axis; `values` are told of the worst one.
    """
    if not ratio.numel():
        return Judgement(stage, counts=counts or {})
    checked = ratio.numel()
    counted = []
    if mask is not None:
        mask = _over(mask, ratio)
        ratio = torch.where(mask, ratio, 0.0)
        counted = [mask.sum()]
    top, place = torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf).flatten().max(0)
    failed, worst, flat, *rest = _numbers((~(ratio <= 1)).sum(), top, place, *counted)
    checked = int(rest[0]) if rest else checked
    if not checked or worst == 0.0:
        return Judgement(stage, checked, counts=counts or {})
    index = [int(i) for i in torch.unravel_index(torch.tensor(int(flat)), ratio.shape)]
    shift = [*first, *(0 for _ in index[len(first) :])]
    where: dict[str, Any] = {
        axis: i + base for axis, i, base in zip(axes, index, shift, strict=True)
    }
    found = _numbers(*(value.expand(ratio.shape)[tuple(index)] for value in values.values()))
    for (name, value), number in zip(values.items(), found, strict=True):
        where[name] = number if value.is_floating_point() else int(number)
    return Judgement(stage, checked, int(failed), worst, where, counts or {})


def judge_same(stage: str, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> Judgement:
    """That each named pair of tensors, got and golden, holds the same bits; the device is waited
    for once while they do."""
    alike = [pair for pair in pairs if pair[1].shape == pair[2].shape]
    flags = [(bits_of(got) != bits_of(golden)).any() for _, got, golden in alike]
    wrong = {name for (name, *_), flag in zip(alike, _numbers(*flags), strict=True) if flag}
    found = [Judgement(stage)]
    for name, got, golden in pairs:
        if name in wrong or got.shape != golden.shape:
            axes = tuple(f"axis {i}" for i in range(got.dim()))
            found.append(judge_equal(stage, got, golden, axes).at(tensor=name))
        else:
            found.append(Judgement(stage, got.numel()))
    return merge(found)[0]


def judge_none(stage: str, masks: Sequence[Mask]) -> Judgement:
    """That no element of any mask is set. A mask lives only as long as it is looked at; the device
    is waited for once while none is."""
    counts, flags = [], []
    for _, make in masks:
        mask = make()
        counts.append(mask.numel())
        flags.append(mask.any())
    found = [Judgement(stage, sum(counts))]
    for (name, make), flag in zip(masks, _numbers(*flags), strict=True):
        if flag:
            ratio = torch.where(make(), math.inf, 0.0)
            axes = tuple(f"axis {i}" for i in range(ratio.dim()))
            found.append(replace(judge_ratio(stage, ratio, axes), checked=0).at(tensor=name))
    return merge(found)[0]


def attempted(stage: str, judge: Callable[[], Judgement]) -> Judgement:
    """A judgement of a further run of the step; what the run raises is a problem of the stage,
    but for memory that ran out."""
    try:
        return judge()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return Judgement(stage, problem=f"the step raised {reason_of(error)}")


def _numbers(*scalars: Tensor) -> list[float]:
    """Scalars as Python numbers, moved off each device in one piece."""
    found = [0.0] * len(scalars)
    for device in {scalar.device for scalar in scalars}:
        here = [i for i, scalar in enumerate(scalars) if scalar.device == device]
        alike = len({scalars[i].dtype for i in here}) == 1
        parts = [scalars[i] if alike else scalars[i].double() for i in here]
        for i, value in zip(here, torch.stack(parts).tolist(), strict=True):
            found[i] = value
    return found


def ratio_of(excess: Tensor, bound: Tensor) -> Tensor:
    """How far outside its allowance, in bounds: 0 inside; inf beyond a zero bound or for NaN."""
    ratio = torch.where(excess <= 0, 0.0, excess / bound)
    return torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf)


def outside(golden: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Distance of golden values from the interval [low, high], 0 within; NaN stays NaN."""
    return torch.maximum(low - golden, golden - high).clamp(min=0)


def bf16_interval(value: Tensor) -> tuple[Tensor, Tensor]:
    """Ends (float32) of the reals that round to each bf16 value; NaN for what is not finite.

    The ends are midpoints to the neighbours, so below a power of two the interval is half as wide.
    Zero of either sign takes both its neighbours' halves.
    """
    bits = value.contiguous().view(torch.int16).int()
    magnitude = bits & 0x7FFF

    def at(code: Tensor) -> Tensor:
        return (code << 16).view(torch.float32)

    here = at(magnitude)
    high = here + (at(magnitude + 1) - here) / 2
    low = torch.where(magnitude == 0, -high, here - (here - at((magnitude - 1).clamp(min=0))) / 2)
    finite = magnitude < 0x7F80
    low, high = torch.where(finite, low, torch.nan), torch.where(finite, high, torch.nan)
    negative = bits < 0
    return torch.where(negative, -high, low), torch.where(negative, -low, high)


def judge_bf16(
    stage: str,
    got: Tensor,
    golden: Tensor,
    bound: Tensor,
    axes: Axes,
    first: Sequence[int] = (),
) -> Judgement:
    """A bf16 is right when its rounding interval, widened by `bound`, contains golden's value."""
    if got.shape != golden.shape:
        return Judgement(stage, problem=f"shape {list(got.shape)}, expected {list(golden.shape)}")
    if got.dtype != torch.bfloat16:
        return Judgement(stage, problem=f"{got.dtype}, expected torch.bfloat16")
    ratio = ratio_of(outside(golden, *bf16_interval(got)), bound)
    return judge_ratio(stage, ratio, axes, first=first, got=got, golden=golden, bound=bound)
