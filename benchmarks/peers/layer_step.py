"""The group of the whole layer step: the fused attention against the pipeline, all else alike."""

from __future__ import annotations

from benchmarks.peers.arms import Arm, Bar, Group
from benchmarks.peers.flash import UnfusedBackend, flash_problem
from benchmarks.peers.judge import Distant, first
from benchmarks.peers.records import to_v4
from benchmarks.peers.steps import Bench, Step
from megabench.weights import BlockScaledWeight, shard_linears

BATCH = "512q1s4k"
UNFUSED_STEP = "step with RoPE + FlashMLA + cast"
STEP_BAR = 0.8


def step_group(bench: Bench) -> Group:
    """512 decodes at 4k, ratio 1, NVFP4, TP1: every launch of the layer but the indexer's."""
    group = Group("step", BATCH, [], dict(bench.absent))
    name = next(iter(bench.backends), None)
    if name is None:
        return group
    backend = bench.backends[name]
    ours = bench.step(BATCH, "nvfp4_ds_mla", backend)
    truth = Distant(ours.beside(bench.eager).run()[0])
    group.arms.append(Arm(f"{name} step", ours.run, first, truth))
    if problem := flash_problem():
        group.absent[UNFUSED_STEP] = problem
        return group
    ours.run()
    pipeline = UnfusedBackend(backend)
    pipeline.caches = (to_v4(ours.caches()[0]), to_v4(ours.caches()[1]))
    peer = Step(bench, ours.workload, bench.pool.layer(ours.workload, pipeline, fresh=True))
    leave_queries_natural(peer)
    note = f"every other op is {name}'s; V4 rows were written before"
    group.arms.append(Arm(UNFUSED_STEP, peer.run, first, truth, note))
    group.bars.append(Bar(f"{name} step", UNFUSED_STEP, STEP_BAR))
    return group


def leave_queries_natural(step: Step) -> None:
    """Give a finalized layer its wq_b in checkpoint order again: heads come out whole."""
    layer, bench = step.layer, step.bench
    linear = shard_linears(bench.weights, bench.geometry, layer.shard, 0)["wq_b"]
    natural = BlockScaledWeight(
        linear.weight.to(bench.device), linear.weight_scale.to(bench.device)
    )
    layer.backend.prepare(natural.weight, natural.weight_scale)
    layer.wq_b = natural
