"""Steps of a layer, recorded: where decode and prefill arms get their arguments from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from benchmarks.peers.records import representable
from megabench.backends import TorchBackend, get_backend
from megabench.backends.arguments import DecodeArguments, PrefillArguments
from megabench.backends.base import Backend
from megabench.bench.arms import LayerPool
from megabench.bench.calls import OpCall, record_step
from megabench.cases import Case
from megabench.formats import FP8, NVFP4
from megabench.geometry import Geometry
from megabench.layer import DeepseekV4MegaAttnAttention
from megabench.metadata import forward_context
from megabench.workload import Workload, build_weights, build_workload

OURS = ("sm90", "triton")
DECODE, PREFILL = "fused_norm_rope_attn_rope_cast_decode", "fused_norm_rope_attn_rope_cast_fwd"


class Bench:
    """What all groups share: device, weights, backends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.geometry = Geometry.load()
        self.backends: dict[str, Backend] = {}
        self.absent: dict[str, str] = {}
        for name in OURS:
            backend = get_backend(name)
            support = [backend.supports(self.geometry, device, r) for r in (FP8, NVFP4)]
            refusals = [s.reason or "refused" for s in support if not s.ok]
            if refusals:
                self.absent[name] = refusals[0]
            else:
                self.backends[name] = backend
        self.pool = LayerPool(lambda _: self.weights)
        self.eager = TorchBackend()
        """Runs the steps that only make arguments, and the step that others are judged by."""

    @cached_property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Random checkpoint linears."""
        return build_weights(self.geometry, 0, self.device)

    def step(self, batch: str, kv_cache: str, backend: Any = None) -> Step:
        """A TP1 step of a ratio-1 layer on rows every arm's records can hold."""
        case = Case.model_validate({"batch": batch, "kv_cache": kv_cache})
        workload = representable(build_workload(case, self.device))
        return Step(self, workload, self.pool.layer(workload, backend or self.eager))


@dataclass
class Step:
    """A layer bound to a workload."""

    bench: Bench
    workload: Workload
    layer: DeepseekV4MegaAttnAttention

    def run(self) -> list[torch.Tensor]:
        """The layer's step -> its output bf16 [T, hidden]."""
        work, layer = self.workload, self.layer
        metadata = work.step_metadata(layer.swa_cache_layer.prefix, layer.compressed_cache_prefix)
        with forward_context(metadata):
            return [layer.forward(work.qr, work.kv, work.positions, work.latent)]

    def beside(self, backend: Any) -> Step:
        """The same step on another backend, on copies of the same caches."""
        return Step(self.bench, self.workload, self.bench.pool.layer(self.workload, backend))

    def call(self, op: str) -> OpCall:
        """The step's one call of `op`, on its real arguments."""
        calls = [call for call in record_step(self.layer, self.run) if call.op == op]
        (call,) = calls
        return call

    def decode_arguments(self) -> DecodeArguments:
        return DecodeArguments(*self.call(DECODE).args)

    def prefill_arguments(self) -> PrefillArguments:
        return PrefillArguments(*self.call(PREFILL).args)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's sliding-window and compressed cache, as they are now."""
        return self.layer.swa_cache_layer.kv_cache, self.layer._compressed_kv_cache()


def own_output(args: Any) -> Any:
    """The arguments with an output pair of their own."""
    out = type(args)(*args.inputs()).output()
    return replace(args, out_fp8=out.data, out_sf=out.scale)


def runner(
    method: Callable[[Any], list[torch.Tensor]], args: Any
) -> Callable[[], list[torch.Tensor]]:
    """A run of one attention op of a backend into an output pair of the arm's own."""
    mine = own_output(args)
    return lambda: method(mine)
