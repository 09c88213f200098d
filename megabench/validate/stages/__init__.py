"""The stages of a step, in its order: one small pure judge each."""

from __future__ import annotations

from megabench.validate.judgement import Judgement
from megabench.validate.stages import (
    attention,
    caches,
    exact,
    holes,
    index_holes,
    load,
    projection,
    query,
    selection,
)
from megabench.validate.stages.attention import sign_test
from megabench.validate.stages.evidence import Evidence
from megabench.validate.stages.projection import tp_sum

JUDGES = (
    load.sinks,
    query.wq_b,
    query.q_layout,
    caches.swa_cache,
    caches.compressed_cache,
    selection.decode_lists,
    selection.prefill_lists,
    selection.gathered_rows,
    attention.attention,
    exact.exact_output,
    holes.holed_lists,
    index_holes.holed_index_lists,
    projection.wo_a,
    projection.wo_b,
    projection.layer_output,
)


def judge_rank(evidence: Evidence) -> list[Judgement]:
    """Every stage of one rank's step; weights and the rotation table are judged before these."""
    found: list[Judgement] = []
    for judge in JUDGES:
        made = judge(evidence)
        found += made if isinstance(made, list) else [made]
    return found


__all__ = ["Evidence", "judge_rank", "load", "projection", "sign_test", "tp_sum"]
