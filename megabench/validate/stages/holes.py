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
_TOKENS = 4
"""Of each phase; one is enough for every pattern."""
_TAIL = 5
"""Columns past the length: a length that is no multiple of a gather's width."""
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
            count = int(evidence.truth.tokens.valid[tokens][:_TOKENS].sum())
            if not count:
                continue
            part = slice(tokens.start, tokens.start + count)
            again = _decode_again if phase == "decode" else _prefill_again
            found += [replace(j, stage=STAGE).at(phase=phase) for j in again(evidence, part)]
    except UnobservedError as why:
        return [missing(STAGE, why)]
    return merge(found)


def holed(rows: Tensor, lens: Tensor, holes: Tensor) -> tuple[Tensor, Tensor]:
    """Lists [t, n] of each token's own rows, and new lengths [t], all int32.

    The first three quarters name nothing (values of `holes` [h] in turn), nor does every third
    column after them; the rest repeats the rows, past the length too, and ends in slots outside any
    pool. Every second token's length is 0.
    """
    tokens, width = rows.shape
    column = torch.arange(width, device=rows.device).expand(tokens, width)
    own = rows.gather(1, column % lens.clamp(min=1)[:, None].long())
    named = (column >= width * 3 // 4) & (column % 3 != 1) & (lens[:, None] > 0)
    lists = torch.where(named, own, holes[column % len(holes)])
    lists[:, width - _FAR :] = torch.iinfo(torch.int32).max
    odd = torch.arange(tokens, device=rows.device) % 2 == 1
    return lists.int(), torch.where(odd, 0, width - _TAIL).int()


def _decode_again(evidence: Evidence, tokens: slice) -> Iterator[Judgement]:
    truth, call = evidence.truth, evidence.call(DECODE)
    none = torch.tensor([-1], dtype=torch.int32, device=truth.workload.device)
    slots, lens = holed(truth.swa_selected.slots[tokens], truth.swa_selected.lens[tokens], none)
    parts = [Paged(evidence.swa_after, slots, lens, truth.layout)]
    given: dict[str, Any] = {"indices": slots, "topk_length": lens}
    if truth.compressed_selected is not None:
        whole = truth.compressed_selected
        slots, lens = holed(whole.slots[tokens], whole.lens[tokens], none)
        # A token whose window is empty still attends to its top-k.
        lens = torch.full_like(lens, slots.shape[1] - _TAIL)
        parts.append(Paged(evidence.compressed_after, slots, lens, truth.layout))
        given |= {"extra_indices": slots, "extra_topk_length": lens}
    yield from _judge_again(evidence, "decode", tokens, call, given, paged_rows(parts))


def _prefill_again(evidence: Evidence, tokens: slice) -> Iterator[Judgement]:
    call = evidence.calls(PREFILL, len(evidence.truth.chunks))[0]
    part = slice(0, min(tokens.stop - tokens.start, len(call.before["indices"])))
    kv = call.before["kv"]
    outside = (-1, -7, len(kv), len(kv) + 1_000_000, 2**31 - 1)
    holes = torch.tensor(outside, dtype=torch.int32, device=kv.device)
    rows, lens = call.before["indices"][part, 0], call.before["topk_length"][part]
    lists, lens = holed(rows, lens, holes)
    given = {"kv": kv, "indices": lists[:, None], "topk_length": lens}
    tokens = slice(tokens.start, tokens.start + part.stop)
    source = workspace_rows(kv, lists, lens)
    yield from _judge_again(evidence, "prefill", tokens, call, given, source)


def _judge_again(
    evidence: Evidence, phase: str, tokens: slice, call: Call, given: dict[str, Any], rows: Rows
) -> Iterator[Judgement]:
    """Call an op as the step did, but for `given` and the tokens, and judge all it gives back."""
    run, truth = evidence.run, evidence.truth
    padded = evidence.call(PAD_AND_INSERT).results[0][tokens]
    positions = truth.tokens.position[tokens]
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
            tokens.start + chunk.start,
            codes[chunk],
            scales[chunk],
            lse[chunk],
            None if logits is None else logits[chunk],
            golden,
            truth.tokens.valid[tokens][chunk],
        )
        yield from (j for j in judge_slice(part) if j.stage != ROUNDING)
