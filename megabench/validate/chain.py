"""The end-to-end golden chain: golden on golden from the inputs to the output, without a verdict.

A legal one-code flip early in a step moves later values by several percent, so this says how far
apart two right answers lie; it cannot tell right from wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megabench.results.schema import StageResult
from megabench.validate.golden import GoldenWeights
from megabench.validate.truth import Truth
from reference.layer import Step, rank_step


def chain_error(truth: Truth, golden: GoldenWeights, outputs: Sequence[Tensor]) -> StageResult:
    """end_to_end: relative L2 distance of the ranks' sum from golden's, over the valid tokens."""
    total = torch.stack([output.double() for output in outputs]).sum(0)
    wanted = _golden_output(truth, golden)
    valid = truth.tokens.valid
    error, size = (total - wanted)[valid].norm(), wanted[valid].norm()
    relative = float(error / size) if float(size) else float(error)
    return StageResult(
        name="end_to_end",
        ok=True,
        checked=wanted[valid].numel(),
        verdict=False,
        detail={"relative_l2": relative},
    )


def _golden_output(truth: Truth, golden: GoldenWeights) -> Tensor:
    """The layer's output as one rank that holds all heads would give it."""
    work = truth.workload
    needed = truth.needed_positions
    table = truth.golden_rotation.new_zeros(int(needed[-1]) + 1 if len(needed) else 1, 64)
    table[needed] = truth.golden_rotation
    lengths = [request.seq_len for request in work.requests]
    step = Step(
        tokens=truth.tokens,
        seq_lens=torch.tensor(lengths, device=work.device),
        qr=work.qr,
        kv=work.kv,
        table=table,
        swa_cache=work.swa_cache,
        swa_block_table=work.swa_block_table,
        weights=golden.shard(1, 0, work.attn_sink),
        compress_ratio=truth.ratio,
        compressed_cache=work.compressed_cache,
        compressed_block_table=work.compressed_block_table,
        latent=work.latent,
        topk=work.topk_indices,
        page_layout=truth.layout,
        model=truth.model,
    )
    return rank_step(step).output.double()
