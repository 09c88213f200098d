"""Names of the timed ops, shared by those who time them and those who show them."""

from __future__ import annotations

STEP = "step"
"""The whole layer step."""
OP_ORDER = (
    "wq_b",
    "pad_insert",
    "compressed_insert",
    "prefill_gather",
    "prefill_attention",
    "prefill",
    "global_topk",
    "decode_attention",
    "wo_a",
    "wo_b",
    STEP,
)
"""Every op in the order a step runs them."""
PARTS = ("prefill_gather", "prefill_attention")
"""Ops that are part of another one: left out where times are added up."""
