"""The attention ops once more, over index lists that the contract allows and no layer makes, and
over padded heads that are not zero.

A layer's lists are dense and end in -1, so a kernel that ignores the length, takes -1 for a row, or
starts its running maximum on a tile without a single valid row looks right on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megabench.validate.judgement import Judgement, judge_none, merge
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
    fenced = CanariedOutput.make(len(padded), run.layer.n_wv_group, padded.device, POISONS[0])
    out = fenced.pair
    given |= {"q": padded, "token_positions": positions.int()}
    given = {name: tensor.clone() for name, tensor in given.items()}  # an op may write its inputs
    chunks = given["q"].view(len(padded), -1, padded.shape[1], Q_CHUNK)
    fill_bytes(chunks[:, :, run.heads :], _PADDED_HEAD)
    given |= {"out_fp8": out.data, "out_sf": out.scale}
    results = getattr(run.layer.backend, call.op)(*{**call.args, **given}.values())
    yield judge_none(STAGE, [("data", fenced.data.lost), ("scale", fenced.scale.lost)])
    codes, scales = output_meaning(out.data[:, : run.groups], out.scale[:, : run.groups])
    lse = results[-1][:, : run.heads]
    logits = results[2][:, : run.heads] if phase == "prefill" else None
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
        part = Slice(
            phase,
            chunk.start,
            codes[chunk],
            scales[chunk],
            lse[chunk],
            None if logits is None else logits[chunk],
            golden,
            truth.tokens.valid[which][chunk],
        )
        yield from (j for j in judge_slice(part) if j.stage != ROUNDING)
