"""Stages by what a kernel author would look at together: one test each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pytest loads this wherever megabench is installed
    from megabench.results import StageResult

GROUPS: dict[str, tuple[str, ...]] = {
    "load": ("rope_table", "weights", "attn_sink"),
    "query": ("wq_b_linear", "q_layout"),
    "caches": ("swa_cache", "compressed_cache"),
    "selection": ("indices_decode", "indices_prefill", "gathered_rows"),
    "attention": (
        "lse_decode",
        "lse_prefill",
        "max_logits",
        "output_scales_decode",
        "output_scales_prefill",
        "output_codes_decode",
        "output_codes_prefill",
        "padding_tokens",
        "rounding_direction",
        "exact_output",
        "holed_lists",
    ),
    "projection": ("wo_a_einsum", "wo_b_linear", "layer_output", "tp_sum"),
    "guards": ("canaries", "inputs_unchanged", "repeatable", "replay", "batch_invariance"),
}
"""Names of the stages of each group, in the order of a step."""
_CATCH_ALL = "guards"
_GROUP_OF = {stage: group for group, stages in GROUPS.items() for stage in stages}


def stages_of(group: str, stages: Sequence[StageResult]) -> list[StageResult]:
    """The stages of one group that give a verdict. One that no group names is a guard, so that
    nothing a case was judged by is left without a test."""
    return [s for s in stages if s.verdict and _GROUP_OF.get(s.name, _CATCH_ALL) == group]
