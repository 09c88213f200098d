"""What a layer holds before its first step: permuted weights, sinks, the rotation table."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megabench.quant import pack_mn_major
from megabench.validate.judgement import Judgement, judge_equal, judge_ratio, merge
from megabench.validate.stages.evidence import Evidence
from megabench.validate.step import RankRun
from megabench.validate.trace import EINSUM, LINEAR
from megabench.validate.truth import Truth
from reference.codes import as_bytes
from reference.layer import Weights
from reference.layouts import fuse_wo_a, fuse_wq_b
from reference.model import HEADS_PER_GROUP
from reference.records import HEAD_DIM

ROW_COLUMN = ("row", "column")


def rotation(run: RankRun, truth: Truth) -> Judgement:
    """rope_table: cos and sin at every position in use, within one float32 step of golden's."""
    table, golden = run.layer.cos_sin_cache, truth.golden_rotation
    needed = truth.needed_positions
    if len(needed) and (table.dim() != 2 or table.shape[1] != 64 or len(table) <= int(needed[-1])):
        return Judgement("rope_table", problem=f"{list(table.shape)} for positions to {needed[-1]}")
    got = table[needed]
    infinity = torch.full_like(golden, math.inf)
    step = torch.maximum(
        torch.nextafter(golden, infinity) - golden, golden - torch.nextafter(golden, -infinity)
    )
    ratio = torch.nan_to_num((got - golden).abs() / step, nan=math.inf, posinf=math.inf)
    return judge_ratio("rope_table", ratio, ("position", "column"), got=got, golden=golden)


def table_for(run: RankRun, truth: Truth, right: bool) -> Tensor:
    """The table golden results are computed with: production's own when it is right."""
    if right:
        return run.layer.cos_sin_cache
    needed = truth.needed_positions
    rows = int(needed[-1]) + 1 if len(needed) else 1
    table = truth.golden_rotation.new_zeros(rows, 64)
    table[needed] = truth.golden_rotation
    return table


def _packed_scales(words: Tensor) -> Tensor:
    """ue8m0 bytes [..., 4w] of int32 words [..., w], little endian."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 255).to(torch.uint8).flatten(-2)


def weights(run: RankRun, golden: Weights) -> Judgement:
    """weights: wq_b rows and wo_a columns permuted with their scales, wo_b as in the checkpoint;
    taken from what the ops were given."""
    linears, einsums = run.of(LINEAR), run.of(EINSUM)
    if len(linears) != 2 or len(einsums) != 1:
        return Judgement(
            "weights", problem=f"{len(linears)} linear and {len(einsums)} fp8_einsum calls"
        )
    wq_b, wo_b = (call.args for call in linears)
    wo_a, wo_a_scale = einsums[0].args["w"]
    wanted_q = fuse_wq_b(golden.wq_b, golden.wq_b_scale, run.heads)
    wanted_o = fuse_wo_a(golden.wo_a, golden.wo_a_scale)
    pairs = (
        ("wq_b", wq_b["w"], wanted_q[0]),
        ("wq_b scale", wq_b["sw"], wanted_q[1]),
        ("wo_a", wo_a, wanted_o[0]),
        ("wo_a scale", _packed_scales(wo_a_scale), wanted_o[1]),
        ("wo_b", wo_b["w"], golden.wo_b),
        ("wo_b scale", wo_b["sw"], golden.wo_b_scale),
    )
    return merge(
        judge_equal(
            "weights",
            as_bytes(got).reshape(-1, got.shape[-1]),
            as_bytes(want).reshape(-1, want.shape[-1]),
            ROW_COLUMN,
        ).at(tensor=name)
        for name, got, want in pairs
    )[0]


def permuting_ops(run: RankRun, golden: Weights) -> Judgement:
    """weights: what the backend's own ops make of standard order, which an engine may call at load;
    this layer permutes by itself. The vendor's take scales packed by fours alone."""
    found = [Judgement("weights")]
    if golden.wq_b_scale.shape[-1] % 4 == 0:
        wanted = fuse_wq_b(golden.wq_b, golden.wq_b_scale, run.heads)
        found += _permuted(
            run, "permute_q_b_proj", golden.wq_b, golden.wq_b_scale, run.heads, wanted
        )
    wanted = fuse_wo_a(golden.wo_a, golden.wo_a_scale)
    found += _permuted(
        run, "permute_wv_proj", golden.wo_a, golden.wo_a_scale, HEADS_PER_GROUP, wanted
    )
    return merge(found)[0]


def _permuted(
    run: RankRun, op: str, codes: Tensor, scale: Tensor, heads: int, wanted: tuple[Tensor, Tensor]
) -> Iterator[Judgement]:
    packed = pack_mn_major(scale if scale.dim() == 3 else scale[None]).view(*scale.shape[:-1], -1)
    made = getattr(run.layer.backend, op)(codes.view(torch.float8_e4m3fn), packed, heads, HEAD_DIM)
    for name, got, want in zip(
        ("codes", "scales"), (as_bytes(made[0]), _packed_scales(made[1])), wanted, strict=True
    ):
        flat = got.reshape(-1, got.shape[-1]), as_bytes(want).reshape(-1, want.shape[-1])
        yield judge_equal("weights", *flat, ROW_COLUMN).at(tensor=f"{op} {name}")


def sinks(evidence: Evidence) -> Judgement:
    """attn_sink: this rank's heads, then -inf for the padded ones."""
    got, live = evidence.run.layer.attn_sink, evidence.weights.sinks
    padding = live.new_full((evidence.run.layer.padded_heads - len(live),), -math.inf)
    return judge_equal("attn_sink", got, torch.cat((live, padding)), ("head",))
