"""Running one rank's step under observation: poisoned buffers, canaries, every op recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megabench.layer import DeepseekV4MegaAttnAttention, QuantizedActivation
from megabench.metadata import forward_context
from megabench.validate.poison import CanariedOutput, Fenced, Poison, poison_workspace
from megabench.validate.trace import Call, TracingBackend
from megabench.workload import Workload


@dataclass(frozen=True)
class Buffers:
    """What a layer's step writes to, each part fenced and poisoned as the layer asks for it."""

    poison: Poison
    outputs: list[CanariedOutput] = field(default_factory=list)
    """The pairs the layer asked for: one."""
    latents: list[Fenced] = field(default_factory=list)
    """What wo_a was to write: one."""

    @classmethod
    def of(cls, layer: DeepseekV4MegaAttnAttention, poison: Poison) -> Buffers:
        """Have the layer's next step allocate here; on the instance, so that the class of the
        layer under test stays what it is."""
        made = cls(poison)
        groups = layer.n_local_groups

        def output(num_tokens: int, hidden_states: Tensor) -> QuantizedActivation:
            device = hidden_states.device
            made.outputs.append(CanariedOutput.make(num_tokens, layer.n_wv_group, device, poison))
            return made.outputs[-1].pair

        def latent(num_tokens: int, device: torch.device) -> Tensor:
            # Attention is done: nobody may read its padded heads.
            made.outputs[-1].poison_from(groups)
            shape = (num_tokens, groups, layer.o_lora_rank)
            made.latents.append(Fenced.dense(shape, torch.bfloat16, device, poison, poison.data))
            return made.latents[-1].tensor

        vars(layer)["_alloc_attn_out"] = output
        vars(layer)["_alloc_latent"] = latent
        return made


@dataclass(frozen=True)
class RankRun:
    """What one rank's step did: its calls, its output pair, its caches and its summand."""

    layer: DeepseekV4MegaAttnAttention
    workload: Workload
    rank: int
    calls: list[Call]
    buffers: Buffers
    swa_cache: Tensor
    compressed_cache: Tensor | None
    output: Tensor

    def of(self, op: str) -> list[Call]:
        """The calls of one op, in order."""
        return [call for call in self.calls if call.op == op]

    @property
    def outputs(self) -> list[CanariedOutput]:
        return self.buffers.outputs

    @property
    def heads(self) -> int:
        return self.layer.n_local_heads

    @property
    def groups(self) -> int:
        return self.layer.n_local_groups


def ready(layer: DeepseekV4MegaAttnAttention, workload: Workload, poison: Poison) -> None:
    """Reserve and poison the workspace of a bound layer, as an engine's warm-up would."""
    if workload.swa_metadata.num_prefills:
        layer._reserve_prefill_workspace(workload.qr)
        poison_workspace(layer.workspace.buffer, poison)
        layer.workspace.lock()


def forward(layer: DeepseekV4MegaAttnAttention, workload: Workload) -> Tensor:
    """The layer's output of one step."""
    metadata = workload.step_metadata(layer.swa_cache_layer.prefix, layer.compressed_cache_prefix)
    with forward_context(metadata):
        return layer.forward(workload.qr, workload.kv, workload.positions, workload.latent)


def run_step(
    layer: DeepseekV4MegaAttnAttention,
    backend: TracingBackend,
    workload: Workload,
    rank: int,
    poison: Poison,
) -> RankRun:
    """One step of a bound layer whose backend is `backend`, everything unowned poisoned first.

    Waits for the device, so that what it raises late is this step's.
    """
    buffers = Buffers.of(layer, poison)
    ready(layer, workload, poison)
    caches = layer.swa_cache_layer.kv_cache, layer._compressed_cache
    with backend.recording() as calls:
        result = forward(layer, workload)
    if workload.device.type == "cuda":
        torch.cuda.synchronize(workload.device)
    # A copy: what an op returns is its own again once the step has ended.
    return RankRun(layer, workload, rank, calls, buffers, *caches, result.clone())
