"""Which rows each token reads: index lists, and the rows a prefill chunk gathers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megabench.validate.judgement import Judgement, judge_equal, merge
from megabench.validate.stages.evidence import Evidence, UnobservedError, missing
from megabench.validate.trace import COMBINE, DECODE, GLOBAL_TOPK, PREFILL, Call
from megabench.validate.truth import Prefill
from reference.indices import global_topk, prefill_combined, slots_of
from reference.records import decode_slots

COLUMN = ("token", "column")


def _within(lists: Tensor, lens: Tensor | None) -> Tensor:
    """The lists with -1 beyond each token's length: what an op may look at."""
    if lens is None:
        return lists
    column = torch.arange(lists.shape[1], device=lists.device)
    return torch.where(column < lens[:, None], lists, -1)


def _judge_read(
    stage: str, name: str, call: Call, lists: str, lens: str, golden: Tensor, golden_lens: Tensor
) -> Iterable[Judgement]:
    """What an attention op was given, against golden's lists of the same tokens."""
    if lists not in call.before:
        yield Judgement(stage, problem=f"the op was given no {lists}")
        return
    got, length = call.before[lists].flatten(1), call.before.get(lens)
    width = max(got.shape[1], golden.shape[1])
    pads = ((0, width - t.shape[1]) for t in (got, golden))
    wide = [
        torch.nn.functional.pad(t, pad, value=-1)
        for t, pad in zip((got, golden), pads, strict=True)
    ]
    yield judge_equal(stage, _within(wide[0], length), _within(wide[1], golden_lens), COLUMN).at(
        list=name
    )
    if length is not None:
        yield judge_equal(stage, length, golden_lens, ("token",)).at(list=f"{name} length")


def decode_lists(evidence: Evidence) -> Judgement:
    """indices_decode: SWA windows and top-k slots as the decode op read them, and the top-k op's
    own result (holes in place; a padding token's row is unspecified)."""
    stage, truth = "indices_decode", evidence.truth
    decoded = slice(0, truth.decode_tokens)
    if not truth.decode_tokens:
        return Judgement(stage)
    try:
        call = evidence.call(DECODE)
        found = [
            *_judge_read(
                stage,
                "swa",
                call,
                "indices",
                "topk_length",
                truth.swa_selected.slots[decoded],
                truth.swa_selected.lens[decoded],
            )
        ]
        if truth.compressed_selected is not None:
            found += _judge_read(
                stage,
                "topk",
                call,
                "extra_indices",
                "extra_topk_length",
                truth.compressed_selected.slots[decoded],
                truth.compressed_selected.lens[decoded],
            )
            found += _global_topk(stage, evidence, evidence.call(GLOBAL_TOPK))
    except UnobservedError as why:
        return missing(stage, why)
    return merge(found)[0]


def _global_topk(stage: str, evidence: Evidence, call: Call) -> Iterable[Judgement]:
    work, truth = evidence.truth.workload, evidence.truth
    assert work.topk_indices is not None
    rows, lens = global_rows(evidence, work.topk_indices[: truth.decode_tokens])
    valid = truth.tokens.valid[: truth.decode_tokens]
    yield judge_equal(stage, call.results[0], rows, COLUMN, valid).at(list="global top-k")
    yield judge_equal(stage, call.results[1], lens, ("token",)).at(list="global top-k length")


def global_rows(evidence: Evidence, topk: Tensor) -> tuple[Tensor, Tensor]:
    """Golden slots and lengths of the decode tokens, whose top-k rows are `topk [t, n]`."""
    work, truth = evidence.truth.workload, evidence.truth
    assert work.compressed_block_table is not None
    assert work.compressed_cache is not None
    decoded = slice(0, truth.decode_tokens)
    return global_topk(
        topk,
        truth.tokens.request[decoded],
        work.compressed_block_table,
        work.compressed_cache.shape[1],
        truth.tokens.valid[decoded],
    )


def prefill_lists(evidence: Evidence) -> Judgement:
    """indices_prefill: each chunk's workspace rows, as the index op made them and the prefill op
    read them."""
    stage, chunks = "indices_prefill", evidence.truth.chunks
    try:
        made, read = (evidence.calls(op, len(chunks)) for op in (COMBINE, PREFILL))
    except UnobservedError as why:
        return missing(stage, why)
    found: list[Judgement] = [Judgement(stage)]
    for chunk, combine, attend in zip(chunks, made, read, strict=True):
        golden, lens = combined(evidence, chunk, prefill_topk(evidence, chunk))
        first = (chunk.tokens.start,)
        found.append(judge_equal(stage, combine.results[0], golden, COLUMN, None, first))
        found.append(judge_equal(stage, combine.results[1], lens, ("token",), None, first))
        found += _judge_read(stage, "prefill", attend, "indices", "topk_length", golden, lens)
    return merge(found)[0]


def prefill_topk(evidence: Evidence, chunk: Prefill) -> Tensor:
    """int32 [t, topk]: the top-k rows of a chunk's tokens; none of them on SWA-only layers."""
    truth, work = evidence.truth, evidence.truth.workload
    topk = work.topk_indices
    if topk is None:
        topk = torch.empty((truth.num_tokens, 0), dtype=torch.int32, device=work.device)
    return topk[chunk.tokens]


def combined(evidence: Evidence, chunk: Prefill, topk: Tensor) -> tuple[Tensor, Tensor]:
    """Golden lists and lengths of a chunk whose tokens have these top-k rows."""
    truth = evidence.truth
    return prefill_combined(
        topk,
        chunk.query_start_loc,
        chunk.seq_lens,
        chunk.gather_lens,
        truth.model.sliding_window,
        truth.ratio,
        topk.shape[1],
        chunk.chunk.M,
        chunk.chunk.N,
    )


def gathered_rows(evidence: Evidence) -> Judgement:
    """gathered_rows: the workspace as the prefill op read it, against the caches' own bytes."""
    stage, chunks = "gathered_rows", evidence.truth.chunks
    found: list[Judgement] = [Judgement(stage)]
    try:
        for chunk, call in zip(chunks, evidence.calls(PREFILL, len(chunks)), strict=True):
            found += _gathered(stage, evidence, chunk, call.before["kv"])
    except UnobservedError as why:
        return missing(stage, why)
    return merge(found)[0]


def _gathered(
    stage: str, evidence: Evidence, chunk: Prefill, workspace: Tensor
) -> Iterable[Judgement]:
    truth, work = evidence.truth, evidence.truth.workload
    M, N = chunk.chunk.M, chunk.chunk.N
    expected = len(chunk.requests) * M
    if len(workspace) != expected:
        yield Judgement(stage, problem=f"a workspace of {len(workspace)} rows, not {expected}")
        return
    requests = workspace.view(len(chunk.requests), M, -1)
    for local, request in enumerate(chunk.requests):
        seq, gather = int(chunk.seq_lens[local]), int(chunk.gather_lens[local])
        parts = [("swa", N, evidence.swa_after, work.swa_block_table, seq - gather, seq)]
        if truth.ratio:
            assert work.compressed_block_table is not None
            closed = seq // truth.ratio
            cache = evidence.compressed_after
            parts.append(("compressed", 0, cache, work.compressed_block_table, 0, closed))
        for name, at, cache, table, start, end in parts:
            row = torch.arange(start, end, device=cache.device)[None]
            owner = torch.tensor([request], device=cache.device)
            slots = slots_of(row, owner, table, cache.shape[1])[0]
            golden = decode_slots(cache, slots, truth.layout).bfloat16()
            got = requests[local, at : at + end - start]
            yield judge_equal(stage, got, golden, ("row", "dim"), None, (start,)).at(
                request=request, cache=name
            )
