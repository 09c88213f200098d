"""A case on a backend made ready to time: a layer, its recorded step, an arm for every op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megabench.backends import Backend
from megabench.bench.calls import (
    OpCall,
    clone_calls,
    prepare_weights,
    record_step,
    returned_tensors,
)
from megabench.bench.copies import Copy
from megabench.bench.measure import Arm
from megabench.bench.ops import (
    ATTENTION,
    StepOp,
    input_of,
    names_rows,
    run_calls,
    split_step,
    targets_of,
    whole_step_work,
)
from megabench.bench.rotation import storages
from megabench.layer import DeepseekV4MegaAttnAttention
from megabench.metadata import forward_context
from megabench.results.names import PARTS, STEP
from megabench.workload import Workload, make_layer

Layer = DeepseekV4MegaAttnAttention
MAX_STEP_SETS = 8
"""A cold step needs whole layers, weights included; a sweep helps where 8 are too small."""


@dataclass
class LayerPool:
    """Finalized weights by shard and backend, kept for the cases of a run that share them."""

    weights: Callable[[Workload], Mapping[str, torch.Tensor]]
    """Checkpoint tensors of a workload's model."""

    def __post_init__(self) -> None:
        self._donors: dict[tuple[object, ...], Layer] = {}

    def layer(self, workload: Workload, backend: Backend, *, fresh: bool = False) -> Layer:
        """A layer bound to clones of the workload's caches; `fresh` ones share no weights."""
        key = (workload.geometry, workload.case.tp, id(backend), workload.device)
        donor = None if fresh else self._donors.get(key)
        layer = make_layer(workload, backend, self.weights(workload), donor=donor)
        if not fresh:
            self._donors.setdefault(key, layer)
        return layer


def step_arms(pool: LayerPool, workload: Workload, name: str, backend: Backend) -> dict[str, Arm]:
    """Arms of one case on one backend by op name, in the order ops are reported; the step last.

    On a CPU, whose steps take long, the parts of the prefill are left to the whole prefill.
    """
    layer = pool.layer(workload, backend)
    first = _step_copy(layer, workload)
    calls = record_step(layer, first.run)
    left_out = PARTS if workload.device.type == "cpu" else ()
    ops = [op for op in split_step(calls) if op.name not in left_out]
    plain = workload.case.family == "random"
    arms = {op.name: _op_arm(op, name, layer.backend, plain) for op in ops}
    if workload.case.num_tokens:
        arms[STEP] = _step_arm(pool, workload, name, backend, first, calls)
    return arms


def _op_arm(op: StepOp, name: str, backend: Backend, plain: bool) -> Arm:
    """`plain` inputs are none of the families that may make an output independent of a sign."""
    works = op.work.flops > 0 or op.name == "pad_insert" or names_rows(op.calls)
    sensitive = plain and works

    def more(count: int) -> list[Copy]:
        copies = []
        for _ in range(count):
            calls = clone_calls(op.calls)
            prepare_weights(calls, backend)
            copies.append(_op_copy(calls, backend, sensitive, op.live_heads))
        return copies

    return Arm(
        backend=name,
        op=op.name,
        work=op.work,
        calls=len(op.calls),
        copy_bytes=sum(storages(op.calls).values()),
        first=_op_copy(op.calls, backend, sensitive, op.live_heads),
        more=more,
        note=_note(op.calls, backend, op.note),
    )


def _note(calls: list[OpCall], backend: Backend, note: str = "") -> str:
    """`note`, and what the backend says its attention times contain beside the kernels."""
    said = getattr(backend, "timing_note", None)
    attends = any(call.op in ATTENTION for call in calls)
    return "; ".join(filter(None, (note, said if attends else None)))


def _op_copy(
    calls: list[OpCall], backend: Backend, sensitive: bool, live_heads: int | None
) -> Copy:
    return Copy(
        run=run_calls(calls, backend, live_heads),
        targets=targets_of(calls),
        flippable=input_of(calls),
        sensitive=sensitive,
        inputs=frozenset(storages(calls)),
    )


def _step_arm(
    pool: LayerPool,
    workload: Workload,
    name: str,
    backend: Backend,
    first: Copy,
    calls: list[OpCall],
) -> Arm:
    def more(count: int) -> list[Copy]:
        layers = (pool.layer(workload, backend, fresh=True) for _ in range(count))
        return [_step_copy(layer, workload) for layer in layers]

    memory = sum(storages(calls).values())
    return Arm(
        backend=name,
        op=STEP,
        work=whole_step_work(calls),
        calls=len(calls),
        copy_bytes=memory,
        first=first,
        more=more,
        max_sets=MAX_STEP_SETS,
        note=_note(calls, backend),
    )


def _step_copy(layer: Layer, workload: Workload) -> Copy:
    """A step of `layer` on inputs of its own."""
    metadata = workload.step_metadata(layer.swa_cache_layer.prefix, layer.compressed_cache_prefix)
    qr, kv = workload.qr.clone(), workload.kv.clone()
    latent = None if workload.latent is None else workload.latent.clone()

    def run() -> list[torch.Tensor]:
        with forward_context(metadata):
            out = layer.forward(qr, kv, workload.positions, latent)
        return list(returned_tensors("the step", out))

    inputs = frozenset(t.untyped_storage().data_ptr() for t in (qr, kv, workload.positions))
    return Copy(run=run, flippable=qr, inputs=inputs)
