"""Groups of the attention ops: decode and prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.arms import Arm, Bar, Group
from benchmarks.peers.flash import (
    DecodeAttention,
    PrefillAttention,
    flash_problem,
    unfused,
)
from benchmarks.peers.judge import AttentionTruth, attention_truth
from benchmarks.peers.records import to_v4
from benchmarks.peers.steps import Bench, runner
from megabench.backends.arguments import DecodeArguments, PrefillArguments

FLASH, UNFUSED = "FlashMLA attention only", "unfused: RoPE + FlashMLA + cast"
DECODE_BARS = {1: 1.0, 32: 1.0, 128: 0.9, 512: 0.8, 1024: 0.75}
PREFILL_BARS = {128: 1.0, 1024: 1.0, 4096: 1.0}
NVFP4_BAR = 1.0
"""NVFP4 rows may take no longer than fp8 ones."""
RECORDS = {"fp8": "fp8_ds_mla", "NVFP4": "nvfp4_ds_mla"}
LENGTH = "2k"
"""Of every decode's sequence: 1024 of them stay below 2^31 bytes of V4 records."""


def decode_group(bench: Bench, s_q: int) -> Group:
    """Fused decodes of fp8 and NVFP4 rows beside FlashMLA's attention of the fp8 rows."""
    group = Group("decode", f"s_q {s_q}", [], dict(bench.absent))
    for record, name in RECORDS.items():
        step = bench.step(f"{s_q}q1s{LENGTH}", name)
        args = step.decode_arguments()
        truth = attention_truth(args)
        for ours, backend in bench.backends.items():
            run = runner(backend.decode, args)  # type: ignore[attr-defined]
            group.arms.append(Arm(f"{ours}, {record}", run, truth.fused, truth.fp8()))
        if record == "fp8":
            peer_args, peer_truth, caches = args, truth, step.caches()
    if problem := flash_problem():
        group.absent |= {FLASH: problem, UNFUSED: problem}
    else:
        attend = DecodeAttention(peer_args, *(to_v4(cache) for cache in caches))
        group.arms += flash_arms(peer_args, attend, peer_truth)
    for ours in bench.backends:
        group.bars.append(Bar(f"{ours}, fp8", FLASH, DECODE_BARS[s_q] if ours == "sm90" else None))
        group.bars.append(Bar(f"{ours}, fp8", UNFUSED))
        nvfp4_bar = NVFP4_BAR if ours == "sm90" else None
        group.bars.append(Bar(f"{ours}, NVFP4", f"{ours}, fp8", nvfp4_bar))
    return group


def prefill_group(bench: Bench, s_q: int) -> Group:
    """Fused prefills over gathered bf16 rows beside FlashMLA's."""
    group = Group("prefill", f"s_q {s_q}", [], dict(bench.absent))
    args = bench.step(f"q{s_q}s8k", "nvfp4_ds_mla").prefill_arguments()
    truth = attention_truth(args)
    for ours, backend in bench.backends.items():
        run = runner(backend.prefill, args)  # type: ignore[attr-defined]
        group.arms.append(Arm(ours, run, truth.fused, truth.fp8()))
    if problem := flash_problem():
        group.absent |= {FLASH: problem, UNFUSED: problem}
    else:
        group.arms += flash_arms(args, PrefillAttention(args), truth)
    for ours in bench.backends:
        group.bars.append(Bar(ours, FLASH, PREFILL_BARS[s_q] if ours == "sm90" else None))
        group.bars.append(Bar(ours, UNFUSED))
    return group


def flash_arms(
    args: DecodeArguments | PrefillArguments, attend: Any, truth: AttentionTruth
) -> Iterator[Arm]:
    """FlashMLA's attention by itself, on a Q rotated before, and in its pipeline."""
    pipeline = unfused(args, attend)
    pipeline()
    rotated = pipeline.rotated.clone()
    yield Arm(FLASH, lambda: [attend(rotated)], truth.plain, truth.bf16(), "no RoPE, no cast")
    yield Arm(UNFUSED, pipeline, truth.fused, truth.fp8(rounded=True))
