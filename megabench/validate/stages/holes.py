"""The attention ops once more, called as the contract allows and no layer does: lists with
holes, rows further apart than they are wide, padded heads that are not zero, no output pair.

A layer's lists are dense and end in -1, so a kernel that ignores the length, takes -1 for a row, or
starts its running maximum on a tile without a single valid row looks right on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megabench.validate.judgement import (
    Judgement,
    attempted,
    judge_none,
    merge,
)
from megabench.validate.poison import POISONS, CanariedOutput, fill_bytes
from megabench.validate.stages.attention import ROUNDING, Slice, judge_slice
from megabench.validate.stages.evidence import Evidence, UnobservedError, missing
from megabench.validate.trace import DECODE, PAD_AND_INSERT, PREFILL, Call
from reference.attention import attend_chunks
from reference.layouts import Q_CHUNK, heads_from_padded_q, output_meaning
from reference.rows import Paged, Rows, paged_rows, workspace_rows

STAGE = "holed_lists"
_PATTERNS = 4
"""Of lists; a phase's first tokens have one each."""
_TAIL = 5
"""Columns past the length: a length that is no multiple of a gather's width."""
_ONE_SHORT = 127
"""A length whose last tile lacks one row, whatever the tile's width."""
_FAR = 2
"""Of them, that name slots outside any pool."""
_PADDED_HEAD = 0x7F
"""Byte of the queries of padded heads: 3.4e38, which no live head may see."""
_GAP = 64
"""Elements between the rows of a spaced tensor; keeps rows aligned to 32 bytes."""
_SPACED = ("q", "indices", "extra_indices")
"""Arguments whose rows may lie further apart than they are wide."""


def holed_lists(evidence: Evidence) -> list[Judgement]:
    """holed_lists: lse, max_logits, scales and codes of a few tokens of each phase, whose own rows
    are listed behind tiles without a valid row, with holes, and past the length."""
    try:
        found = [Judgement(STAGE)]
        for phase, tokens in evidence.truth.phases().items():
            count = int(evidence.truth.tokens.valid[tokens].sum())
            again = _decode_again if phase == "decode" else _prefill_again
            for which, first in _calls(min(count, _PATTERNS)):
                judged = again(evidence, tokens.start + which.to(evidence.table.device), first)
                found += [replace(j, stage=STAGE).at(phase=phase) for j in judged]
    except UnobservedError as why:
        return [missing(STAGE, why)]
    return merge(found)


def _calls(tokens: int) -> Iterator[tuple[Tensor, int]]:
    """Tokens of a phase by number, and the pattern the first of them has: once as many as the step
    has, for an op that keeps something by their count, then one for each pattern left."""
    if tokens:
        yield torch.arange(tokens), 0
    if 0 < tokens < _PATTERNS:
        yield torch.arange(_PATTERNS - tokens) % tokens, tokens


def holed(rows: Tensor, lens: Tensor, holes: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Lists [t, n] of each token's own rows, and new lengths [t], all int32.

    Tokens take four patterns in turn, from number `first` on. 0: three quarters of nothing (values
    of `holes` [h] in turn), then rows with every third column a hole; 1: nothing; 2: one row; 3:
    one row less than whole tiles. Rows stand past the lengths too, and slots outside any pool at
    the end.
    """
    tokens, width = rows.shape
    column = torch.arange(width, device=rows.device).expand(tokens, width)
    pattern = (torch.arange(tokens, device=rows.device)[:, None] + first) % _PATTERNS
    own = rows.gather(1, column % lens.clamp(min=1)[:, None].long())
    broken = (column >= width * 3 // 4) & (column % 3 != 1)
    named = ((pattern >= 2) | broken) & (lens[:, None] > 0)
    lists = torch.where(named, own, holes[column % len(holes)])
    far = (column >= width - _FAR) & (pattern < 3)
    lists = torch.where(far, torch.iinfo(torch.int32).max, lists)
    lengths = torch.tensor([width - _TAIL, 0, 1, min(_ONE_SHORT, width)], device=rows.device)
    return lists.int(), lengths[pattern[:, 0]].int()


def _decode_again(evidence: Evidence, which: Tensor, first: int) -> Iterator[Judgement]:
    truth, call = evidence.truth, evidence.call(DECODE)
    none = torch.tensor([-1], dtype=torch.int32, device=truth.workload.device)
    slots, lens = holed(
        truth.swa_selected.slots[which], truth.swa_selected.lens[which], none, first
    )
    parts = [Paged(evidence.swa_after, slots, lens, truth.layout)]
    given: dict[str, Any] = {"indices": slots, "topk_length": lens}
    if truth.compressed_selected is not None:
        whole = truth.compressed_selected
        slots, lens = holed(whole.slots[which], whole.lens[which], none, first)
        # A token whose window is empty still attends to its top-k; one key is one key.
        many = torch.full_like(lens, slots.shape[1] - _TAIL)
        lens = torch.where(lens == 0, many, torch.where(lens == 1, 0, lens))
        parts.append(Paged(evidence.compressed_after, slots, lens, truth.layout))
        given |= {"extra_indices": slots, "extra_topk_length": lens}
    yield from _judge_again(evidence, "decode", which, call, given, paged_rows(parts))


def _prefill_again(evidence: Evidence, which: Tensor, first: int) -> Iterator[Judgement]:
    call = evidence.calls(PREFILL, len(evidence.truth.chunks))[0]
    start, tokens = evidence.truth.chunks[0].tokens.start, len(call.before["indices"])
    row = (which - start) % max(tokens, 1)
    kv = call.before["kv"]
    outside = (-1, -7, len(kv), len(kv) + 1_000_000, 2**31 - 1)
    holes = torch.tensor(outside, dtype=torch.int32, device=kv.device)
    rows, lens = call.before["indices"][row, 0], call.before["topk_length"][row]
    lists, lens = holed(rows, lens, holes, first)
    given = {"kv": kv, "indices": lists[:, None], "topk_length": lens}
    source = workspace_rows(kv, lists, lens)
    yield from _judge_again(evidence, "prefill", start + row, call, given, source)


def spaced(tensor: Tensor) -> Tensor:
    """A copy whose rows [n, ...] lie `_GAP` elements apart."""
    rows = tensor.flatten(1)
    return torch.nn.functional.pad(rows, (0, _GAP))[:, : rows.shape[1]].view(tensor.shape)


def _judge_again(
    evidence: Evidence, phase: str, which: Tensor, call: Call, given: dict[str, Any], rows: Rows
) -> Iterator[Judgement]:
    """Call an op as the step did, but for `given` and the tokens, and judge all it gives back;
    tokens are told by their place in this call."""
    run, truth = evidence.run, evidence.truth
    padded = evidence.call(PAD_AND_INSERT).results[0][which]
    positions = truth.tokens.position[which]
    if evidence.table is run.layer.cos_sin_cache:  # golden's own has only the step's positions
        positions = positions // 2
    given |= {"q": padded, "token_positions": positions.int()}
    fenced = CanariedOutput.make(len(padded), run.layer.n_wv_group, padded.device, POISONS[0])
    pair = fenced.pair.data, fenced.pair.scale
    op, fresh = getattr(run.layer.backend, call.op), partial(_fresh, call, given, run.heads)
    returned = op(*fresh(*pair).values())
    yield judge_none(STAGE, [("data", fenced.data.lost), ("scale", fenced.scale.lost)])
    made = [returned, [*pair, *returned[2:]]]
    yield attempted(STAGE, lambda: _allocated(op(*fresh(None, None).values()), made))
    for chunk, golden in attend_chunks(
        heads_from_padded_q(padded, run.heads),
        positions,
        evidence.table,
        rows,
        evidence.weights.sinks,
        truth.model.softmax_scale,
        evidence.dtype,
        sums_rounded_p=evidence.sums_rounded_p,
    ):
        for data, scale, *logs in made:
            codes, scales = output_meaning(data[:, : run.groups], scale[:, : run.groups])
            part = Slice(
                phase,
                chunk.start,
                codes[chunk],
                scales[chunk],
                logs[-1][chunk],
                logs[0][chunk] if phase == "prefill" else None,
                golden,
                truth.tokens.valid[which][chunk],
                run.layer.padded_heads,
            )
            yield from (j for j in judge_slice(part) if j.stage != ROUNDING)


def _fresh(
    call: Call, given: dict[str, Any], heads: int, out_fp8: Tensor | None, out_sf: Tensor | None
) -> dict[str, Any]:
    """A call's arguments but for `given`, copies, for an op may write its inputs: rows of queries
    and lists spaced, queries of padded heads huge."""
    copies = {k: spaced(t) if k in _SPACED else t.clone() for k, t in given.items()}
    tokens, padded_heads, _ = copies["q"].shape
    fill_bytes(copies["q"].view(tokens, -1, padded_heads, Q_CHUNK)[:, :, heads:], _PADDED_HEAD)
    return {**call.args, **copies, "out_fp8": out_fp8, "out_sf": out_sf}


def _allocated(results: list[Tensor], made: list[list[Tensor]]) -> Judgement:
    """Take in what an op made that was given no output pair."""
    made.append(results)
    return Judgement(STAGE)
