"""Guards: memory a step must leave alone, and results that no poison or repeat may change."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megabench.validate.judgement import Judgement, bits_of, judge_equal, judge_ratio, merge
from megabench.validate.stages.evidence import Evidence, UnobservedError
from megabench.validate.step import RankRun
from megabench.validate.trace import (
    DECODE,
    EINSUM,
    GLOBAL_TOPK,
    LINEAR,
    PAD_AND_INSERT,
    PREFILL,
    whole,
)
from megabench.validate.truth import Truth
from megabench.workload import Workload
from reference.records import read_record

_KEPT_RESULTS = (LINEAR, PAD_AND_INSERT, GLOBAL_TOPK)
"""Ops whose results stay valid to the end of the step (a prefill's lists are reused memory)."""


def canaries(run: RankRun) -> Judgement:
    """canaries: nothing written before, after or between the rows of the output pair."""
    found = [Judgement("canaries")]
    for output in run.outputs:
        for name, intact in zip(("data", "scale"), output.canaries(), strict=True):
            ratio = torch.where(intact, 0.0, math.inf)
            found.append(judge_ratio("canaries", ratio, ("byte",)).at(buffer=name))
    return merge(found)[0]


class Inputs:
    """Copies of everything a step reads and must not write, to be compared afterwards."""

    def __init__(self, workload: Workload) -> None:
        self._kept = [(name, tensor, tensor.clone()) for name, tensor in _inputs(workload)]

    def unchanged(self, run: RankRun) -> Judgement:
        """inputs_unchanged: the step's inputs, and every result once an op has given it.

        Inputs are put back, so that golden results start from the case's own.
        """
        found = [Judgement("inputs_unchanged")]
        for name, now, then in self._kept:
            same = _same(name, now, then)
            found.append(same)
            if not same.ok:
                now.copy_(then)
        for call in run.calls:
            for name, then in call.after.items():
                found.append(_same(f"{call.op} {name}", call.args[name], then))
            if call.op in _KEPT_RESULTS:
                for now, then in zip(call.returned, call.results, strict=True):
                    found.append(_same(f"{call.op} result", now, then))
        return merge(found)[0]


def _inputs(workload: Workload) -> Iterator[tuple[str, Tensor]]:
    for holder in (workload, workload.swa_metadata, workload.compressed_metadata):
        for name, value in vars(holder).items() if holder is not None else ():
            if isinstance(value, Tensor) and not name.endswith("_cache"):
                yield name, value


def _same(name: str, now: Tensor, then: Tensor) -> Judgement:
    if now.shape == then.shape and torch.equal(bits_of(now), bits_of(then)):
        return Judgement("inputs_unchanged", now.numel())
    return judge_equal("inputs_unchanged", now.reshape(-1), then.reshape(-1), ("element",)).at(
        tensor=name
    )


def fingerprint(tensor: Tensor) -> int:
    """A position-dependent checksum of the whole storage behind a tensor."""
    data = whole(tensor).view(torch.uint8)
    words = data[: len(data) // 8 * 8].view(torch.int64)
    weight = torch.arange(1, 2 * len(words), 2, device=data.device)
    return int((words * weight).sum()) + int(data[len(words) * 8 :].sum())


def repeatable(first: Evidence, second: Evidence) -> Judgement:
    """repeatable: a second run over different poison gives the same live bytes."""
    found = [Judgement("repeatable")]
    try:
        pairs = zip(_live(first), _live(second), strict=True)
        for (name, a), (_, b) in pairs:
            axes = tuple(f"axis {i}" for i in range(a.dim()))
            found.append(judge_equal("repeatable", b, a, axes).at(tensor=name))
    except (UnobservedError, ValueError):
        return Judgement("repeatable", problem="the two runs made different calls")
    return merge(found)[0]


def _live(evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Every byte of a step whose value the contract fixes."""
    run, truth, live = evidence.run, evidence.truth, evidence.run.heads
    for call in run.calls:
        match call.op:
            case str() as op if op in (LINEAR, PAD_AND_INSERT):
                yield op, call.results[0]
            case str() as op if op == DECODE:
                yield "lse", call.results[2][:, :live]
            case str() as op if op == PREFILL:
                yield "max_logits", call.results[2][:, :live]
                yield "lse", call.results[3][:, :live]
            case str() as op if op == EINSUM:
                yield "wo_a", call.after["out"]
    yield "swa_cache", _written(evidence.swa_after, truth.swa_slots, truth)
    if truth.compressed_slots is not None:
        yield "compressed_cache", _written(evidence.compressed_after, truth.compressed_slots, truth)
    codes, scales = evidence.output
    yield "codes", codes
    yield "scales", scales
    yield "output", run.output


def _written(cache: Tensor, slots: Tensor, truth: Truth) -> Tensor:
    return read_record(cache, slots[slots >= 0], truth.layout)
