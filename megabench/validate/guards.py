"""Guards: memory a step must leave alone, and results that no poison or repeat may change."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megabench.layer import DeepseekV4MegaAttnAttention
from megabench.validate.judgement import (
    Judgement,
    Mask,
    judge_none,
    judge_same,
    merge,
)
from megabench.validate.poison import strayed_bytes
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

_KEPT_RESULTS = {LINEAR: 0, PAD_AND_INSERT: 0, GLOBAL_TOPK: 0, DECODE: 2, PREFILL: 2}
"""Ops whose results stay valid to the end of the step (a prefill's lists are reused memory), and
the first that does: an attention op's output pair is looked at as a buffer."""
_COLUMNS = 4099
"""Of a storage's words, for its checksum; a prime, which no layout's strides divide."""


def canaries(run: RankRun, truth: Truth) -> Judgement:
    """canaries: nothing written before, after or between the rows of the output pair and of wo_a's
    result, nor in the prefill workspace beside its rows and lists; no op wrote beside its slice."""
    fences = [("latent", latent) for latent in run.buffers.latents]
    for output in run.outputs:
        fences += [("data", output.data), ("scale", output.scale)]
    masks: list[Mask] = [(name, fence.lost) for name, fence in fences]
    if truth.chunks:
        masks.append(("workspace", lambda: _strayed(run, truth)))
    for call in run.calls:
        masks += [
            (f"{name} beside the slice of {call.op}", lost.bool)
            for name, lost in call.trespass.items()
            if name in call.after
        ]
    return judge_none("canaries", masks)


def _strayed(run: RankRun, truth: Truth) -> Tensor:
    owned = list(_workspace_views(run, truth))
    return strayed_bytes(run.layer.workspace.buffer, owned, run.buffers.poison)


def _workspace_views(run: RankRun, truth: Truth) -> Iterator[Tensor]:
    """The parts of the workspace that the step's chunks fill."""
    memory = run.layer.workspace.buffer.untyped_storage().data_ptr()
    for chunk, call in zip(truth.chunks, run.of(PREFILL), strict=False):
        rows, lists, lens = (call.args[name] for name in ("kv", "indices", "topk_length"))
        if any(t.untyped_storage().data_ptr() != memory for t in (rows, lists, lens)):
            continue  # an op was given other memory, which its own stage tells
        yield from (lists, lens)
        M, N = chunk.chunk.M, chunk.chunk.N
        for local in range(len(chunk.requests)):
            closed = int(chunk.seq_lens[local]) // truth.ratio if truth.ratio else 0
            first, gathered = local * M, int(chunk.gather_lens[local])
            yield rows[first : first + closed]
            yield rows[first + N : first + N + gathered]


class Inputs:
    """Copies of everything a step reads and must not write, to be compared afterwards."""

    def __init__(self, workload: Workload, layer: DeepseekV4MegaAttnAttention) -> None:
        read = [*_inputs(workload), ("cos_sin_cache", layer.cos_sin_cache)]
        self._kept = [(name, tensor, tensor.clone()) for name, tensor in read]

    def unchanged(self, run: RankRun) -> Judgement:
        """inputs_unchanged: the step's inputs, an op's by that op, and every result once an op has
        given it, caches with the bytes between their pages.

        Inputs are put back, so that golden results start from the case's own.
        """
        pairs = list(self._kept)
        for call in run.calls:
            for name, then in call.after.items():
                pairs.append((f"{call.op} {name}", *_fixed(run, name, call.args[name], then)))
            if call.op in _KEPT_RESULTS:
                results = [*zip(call.returned, call.results, strict=True)]
                kept = results[_KEPT_RESULTS[call.op] :]
                pairs += [(f"{call.op} result", now, then) for now, then in kept]
        own = [
            (f"{call.op} {name}", lost.bool)
            for call in run.calls
            for name, lost in call.trespass.items()
            if name in call.before
        ]
        stage = "inputs_unchanged"
        judged = merge((judge_same(stage, pairs), judge_none(stage, own)))[0]
        if not judged.ok:
            for _, now, then in self._kept:
                now.copy_(then)
        return judged


def _fixed(run: RankRun, name: str, now: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
    """What must stay of a buffer that an op wrote: all of a cache's storage, and the live groups
    of an output, whose others are unspecified."""
    if name in ("out_fp8", "out_sf"):
        return now[:, : run.groups], then[:, : run.groups]
    return (whole(now), whole(then)) if "cache" in name else (now, then)


def _inputs(workload: Workload) -> Iterator[tuple[str, Tensor]]:
    for holder in (workload, workload.swa_metadata, workload.compressed_metadata):
        for name, value in vars(holder).items() if holder is not None else ():
            if isinstance(value, Tensor) and not name.endswith("_cache"):
                yield name, value


def fingerprint(tensor: Tensor) -> tuple[int, ...]:
    """Position-dependent checksums of the whole storage behind a tensor, along rows and columns;
    added up, they would not see a word's top bit, which counts 2^63 in each."""
    data = whole(tensor).view(torch.uint8)
    count = len(data) // 8
    rows = data[: count // _COLUMNS * _COLUMNS * 8].view(torch.int64).view(-1, _COLUMNS)
    # Sums along both axes, so that the storage is read twice and never copied.
    sums = [rows.sum(0), rows.sum(1), data[rows.numel() * 8 :].long()]
    odd = [(s * (2 * torch.arange(len(s), device=s.device) + 1)).sum() for s in sums]
    return tuple(torch.stack(odd).tolist())


def repeatable(first: Evidence, second: Evidence) -> Judgement:
    """repeatable: a second run over different poison gives the same live bytes."""
    try:
        pairs = zip(_live(first), _live(second), strict=True)
        return judge_same("repeatable", [(name, b, a) for (name, a), (_, b) in pairs])
    except (UnobservedError, ValueError):
        return Judgement("repeatable", problem="the two runs made different calls")


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
