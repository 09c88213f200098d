"""Cache bytes: the rows a step inserts, and every other byte as it was."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megabench.validate.judgement import Judgement, judge_equal, judge_ratio, merge
from megabench.validate.stages.evidence import Evidence, UnobservedError, missing
from megabench.validate.trace import INSERT_COMPRESSED, PAD_AND_INSERT, snapshot, whole
from reference.cache import InsertedRows, acceptable
from reference.quantize import spread
from reference.records import read_record, record_of, unpack, write_record


def swa_cache(evidence: Evidence) -> Judgement:
    """swa_cache: one record a valid token, RoPE'd at its position, in its slot."""
    truth, work = evidence.truth, evidence.truth.workload
    try:
        call = evidence.call(PAD_AND_INSERT)
    except UnobservedError as why:
        return missing("swa_cache", why)
    if not _same_memory(call.args["swa_cache"], evidence.run.swa_cache):
        return Judgement("swa_cache", problem="the insertion was given another cache")
    expected = truth.inserted(False, evidence.table)
    return judge_insertion(
        "swa_cache",
        truth.layout,
        evidence.swa_after,
        work.swa_cache,
        truth.swa_slots,
        expected,
    )


def compressed_cache(evidence: Evidence) -> Judgement:
    """compressed_cache: one record a row that closes, RoPE'd at its group's first position."""
    truth, work = evidence.truth, evidence.truth.workload
    stage = "compressed_cache"
    if not truth.ratio:
        return Judgement(stage)
    assert work.compressed_cache is not None
    assert truth.compressed_slots is not None
    try:
        call = evidence.call(INSERT_COMPRESSED)
    except UnobservedError as why:
        return missing(stage, why)
    bound = evidence.run.compressed_cache
    if bound is None or not _same_memory(call.args["cache"], bound):
        return Judgement(stage, problem="the insertion was given another cache")
    expected = truth.inserted(True, evidence.table)
    return judge_insertion(
        stage,
        truth.layout,
        evidence.compressed_after,
        work.compressed_cache,
        truth.compressed_slots,
        expected,
    )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride(0) == b.stride(0) and len(a) == len(b)


def judge_insertion(
    stage: str, layout: str, after: Tensor, before: Tensor, slots: Tensor, expected: InsertedRows
) -> Judgement:
    """A cache's bytes after an insertion of `expected` rows into `slots` (-1 writes nothing).

    `after` and `before` are whole caches; legal choices of another code at a tie are counted.
    """
    named = slots >= 0
    written = read_record(after, slots.clamp(min=0), layout) if len(after) else expected.bytes
    good = acceptable(expected, written)
    group = record_of(after.shape[-1]).group
    (got, got_scale), (golden, golden_scale) = unpack(written), unpack(expected.bytes)
    flips = int(((got != golden) & good & named[:, None]).sum())
    rows = judge_ratio(
        stage,
        torch.where(good, 0.0, math.inf),
        ("token", "dim"),
        mask=named,
        counts={"ties": flips},
        got=got,
        golden=golden,
        got_scale=spread(got_scale, group),
        golden_scale=spread(golden_scale, group),
        slot=slots[:, None],
    )
    return merge((rows, _untouched(stage, after, before, slots, layout)))[0]


def _untouched(stage: str, after: Tensor, before: Tensor, slots: Tensor, layout: str) -> Judgement:
    """Every byte of the storage that the step does not own: other slots, page padding."""
    mine = slots[slots >= 0]
    restored = snapshot(after)
    if len(mine):
        write_record(restored, mine, read_record(before, mine, layout), layout)
    return judge_equal(stage, whole(restored), whole(before), ("unowned byte",))
