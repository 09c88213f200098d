"""The index ops once more, over top-k rows with holes and with rows that no request holds.

A layer's top-k rows are dense and name rows that are there, so an op that stops at the first -1,
closes the gap, or looks at neither end of a row's range looks right on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megabench.validate.judgement import Judgement, judge_equal, judge_none, merge
from megabench.validate.poison import POISONS, Fenced
from megabench.validate.stages.evidence import Evidence, UnobservedError, missing
from megabench.validate.stages.holes import STAGE
from megabench.validate.stages.selection import COLUMN, combined, global_rows, prefill_topk
from megabench.validate.trace import COMBINE, GLOBAL_TOPK


def holed_index_lists(evidence: Evidence) -> Judgement:
    """holed_lists: what the index ops make of holes and of rows past the workspace, exactly."""
    found = [Judgement(STAGE)]
    if evidence.truth.ratio:
        try:
            found += _global_again(evidence)
            found += _combined_again(evidence)
        except UnobservedError as why:
            return missing(STAGE, why)
    return merge(found)[0]


def _broken(rows: Tensor, far: int | None = None) -> Tensor:
    """Rows int32 [t, n] of which every third is a hole and, if `far` is given, every third beyond
    the first `far` rows."""
    column = torch.arange(rows.shape[1], device=rows.device)
    broken = torch.where(column % 3 == 1, -1, rows)
    return broken if far is None else torch.where(column % 3 == 2, rows + far, broken)


def _global_again(evidence: Evidence) -> Iterator[Judgement]:
    truth, op = evidence.truth, getattr(evidence.run.layer.backend, GLOBAL_TOPK)
    if not truth.decode_tokens:
        return
    args = evidence.call(GLOBAL_TOPK).args
    rows = _broken(args["topk_indices"])
    lists, lens = op(*{**args, "topk_indices": rows}.values())
    golden, golden_lens = global_rows(evidence, rows)
    valid = truth.tokens.valid[: truth.decode_tokens]
    yield judge_equal(STAGE, lists, golden, COLUMN, valid).at(op=GLOBAL_TOPK)
    yield judge_equal(STAGE, lens, golden_lens, ("token",)).at(op=GLOBAL_TOPK)


def _fenced(like: Tensor) -> Fenced:
    poison = POISONS[0]
    return Fenced.dense(tuple(like.shape), like.dtype, like.device, poison, poison.data)


def _combined_again(evidence: Evidence) -> Iterator[Judgement]:
    chunks, op = evidence.truth.chunks, getattr(evidence.run.layer.backend, COMBINE)
    for chunk, call in zip(chunks, evidence.calls(COMBINE, len(chunks)), strict=True):
        rows = _broken(prefill_topk(evidence, chunk), chunk.chunk.N)
        fenced = [_fenced(part) for part in call.args["out"]]
        out = tuple(fence.tensor for fence in fenced)
        lists, lens = op(*{**call.args, "topk_indices": rows, "out": out}.values())
        yield judge_none(STAGE, [(f"{COMBINE} out", fence.lost) for fence in fenced])
        golden, golden_lens = combined(evidence, chunk, rows)
        first = (chunk.tokens.start,)
        yield judge_equal(STAGE, lists, golden, COLUMN, None, first).at(op=COMBINE)
        yield judge_equal(STAGE, lens, golden_lens, ("token",), None, first).at(op=COMBINE)
