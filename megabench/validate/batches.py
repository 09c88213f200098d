"""Requests in other company: alone, and in another order, they are what they were, bit for bit.

A backend that claims it (`batch_invariant = True`) is held to it. Others may choose tiles and
splits by the batch's size, so for them the stage only reports how many values differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megabench.cases import Request
from megabench.validate.judgement import Judgement, judge_same
from megabench.validate.stages.evidence import Evidence
from megabench.validate.step import RankRun, run_step
from megabench.validate.trace import DECODE, EINSUM, PREFILL, TracingBackend
from megabench.workload import bind, subset, tokens_of
from reference.layouts import output_meaning

STAGE = "batch_invariance"
CLAIM = "batch_invariant"
"""The attribute by which a backend claims it."""
_SAMPLED = 3


def other_batches(requests: Sequence[Request], draw: int) -> list[list[int]]:
    """Batches of a step's requests by number: three of them alone, chosen by `draw`, and all in
    reverse order, decodes still first. None for a step of one request."""
    count = len(requests)
    if count < 2:
        return []
    spread = max(1, count // _SAMPLED)
    alone = sorted({(draw + k * spread) % count for k in range(_SAMPLED)})
    decodes = sum(request.is_decode for request in requests)
    reverse = [*reversed(range(decodes)), *reversed(range(decodes, count))]
    return [*([one] for one in alone), *([reverse] if reverse != list(range(count)) else [])]


def batch_invariance(evidence: Evidence, backend: TracingBackend, draw: int) -> Judgement:
    """batch_invariance: codes, scales, lse, wo_a's and the layer's output of every other batch."""
    run, work = evidence.run, evidence.truth.workload
    claimed = bool(getattr(backend.wrapped, CLAIM, False))
    whole, pairs = dict(_results(run)), []
    for order in other_batches(work.requests, draw):
        part = subset(work, order)
        bind(run.layer, part)
        alone = run_step(run.layer, backend, part, run.rank, run.buffers.poison)
        at = tokens_of(work, order).to(work.device)
        pairs += [
            (f"{name} of requests {order}", got, whole[name][at]) for name, got in _results(alone)
        ]
    return replace(judge_same(STAGE, pairs), verdict=claimed)


def _results(run: RankRun) -> Iterator[tuple[str, Tensor]]:
    """What a step made of each of its tokens, by name, tokens first."""
    (output,), groups = run.outputs, run.groups
    codes, scales = output_meaning(output.pair.data[:, :groups], output.pair.scale[:, :groups])
    yield from (("codes", codes), ("scales", scales), ("output", run.output))
    logs = [call.results[-1][:, : run.heads] for op in (DECODE, PREFILL) for call in run.of(op)]
    if logs:
        yield "lse", torch.cat(logs)
    for call in run.of(EINSUM):
        yield "wo_a", call.after["out"]
