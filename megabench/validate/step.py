"""Running one rank's step under observation: poisoned buffers, canaries, every op recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megabench.formats import QUANT_GROUP, WV_GROUP_SIZE
from megabench.layer import DeepseekV4MegaAttnAttention, QuantizedActivation
from megabench.metadata import forward_context
from megabench.quant import MXFP8_DYNAMIC, tma_aligned
from megabench.validate.trace import Call, TracingBackend, whole
from megabench.workload import Workload

MARGIN = 256
"""Bytes of canary before and after an output buffer; keeps its alignment."""


@dataclass(frozen=True)
class Poison:
    """Fills of memory nobody owns. A right result depends on none of them."""

    cache: int
    data: int
    scale: int


POISONS = (Poison(cache=0xFF, data=0x7F, scale=0xFE), Poison(cache=0xA5, data=0x01, scale=0x01))
"""NaN codes and a scale of 2^127 once, small finite values once."""


@dataclass(frozen=True)
class CanariedOutput:
    """The step's output pair with canaries before, after, and in the scale's ceil4 padding."""

    pair: QuantizedActivation
    poison: Poison

    @classmethod
    def make(cls, tokens: int, groups: int, device: torch.device, poison: Poison) -> CanariedOutput:
        """As `alloc_mega_attn_output` lays the pair out, inside larger poisoned storages."""
        width = WV_GROUP_SIZE * 512
        words, stride = width // QUANT_GROUP // 4, tma_aligned(tokens)
        data = torch.full(
            (2 * MARGIN + tokens * groups * width,), poison.data, dtype=torch.uint8, device=device
        )
        scale = torch.full(
            (2 * MARGIN + groups * words * stride * 4,),
            poison.scale,
            dtype=torch.uint8,
            device=device,
        ).view(torch.int32)
        codes = data.view(torch.float8_e4m3fn)[MARGIN : len(data) - MARGIN]
        codes = codes.view(tokens, groups, width)
        strides = (1, words * stride, stride)
        scales = scale.as_strided((tokens, groups, words), strides, MARGIN // 4)
        pair = QuantizedActivation(codes, scales, torch.bfloat16, codes.shape, MXFP8_DYNAMIC)
        return cls(pair, poison)

    def canaries(self) -> tuple[Tensor, Tensor]:
        """bool: data bytes and scale bytes outside the pair that still hold the poison."""
        data = whole(self.pair.data).view(torch.uint8)
        outside = torch.cat((data[:MARGIN], data[len(data) - MARGIN :]))
        storage = whole(self.pair.scale)
        owned = torch.zeros_like(storage, dtype=torch.bool)
        shape, strides = self.pair.scale.shape, self.pair.scale.stride()
        owned.as_strided(shape, strides, self.pair.scale.storage_offset()).fill_(True)
        words = storage[~owned].view(torch.uint8)
        return outside == self.poison.data, words == self.poison.scale


@dataclass(frozen=True)
class RankRun:
    """What one rank's step did: its calls, its output pair, its caches and its summand."""

    layer: DeepseekV4MegaAttnAttention
    workload: Workload
    rank: int
    calls: list[Call]
    outputs: list[CanariedOutput]
    """The pairs the layer asked for: one."""
    swa_cache: Tensor
    compressed_cache: Tensor | None
    output: Tensor

    def of(self, op: str) -> list[Call]:
        """The calls of one op, in order."""
        return [call for call in self.calls if call.op == op]

    @property
    def heads(self) -> int:
        return self.layer.n_local_heads

    @property
    def groups(self) -> int:
        return self.layer.n_local_groups


def run_step(
    layer: DeepseekV4MegaAttnAttention,
    backend: TracingBackend,
    workload: Workload,
    rank: int,
    poison: Poison,
) -> RankRun:
    """One step of a bound layer whose backend is `backend`, everything unowned poisoned first."""
    outputs: list[CanariedOutput] = []

    def allocate(num_tokens: int, hidden_states: Tensor) -> QuantizedActivation:
        made = CanariedOutput.make(num_tokens, layer.n_wv_group, hidden_states.device, poison)
        outputs.append(made)
        return made.pair

    # On the instance, so that the class of the layer under test stays what it is.
    vars(layer)["_alloc_attn_out"] = allocate
    if workload.swa_metadata.num_prefills:
        layer._reserve_prefill_workspace(workload.qr)
        layer.workspace.buffer.fill_(poison.cache)
        layer.workspace.lock()
    caches = layer.swa_cache_layer.kv_cache, layer._compressed_cache
    metadata = workload.step_metadata(layer.swa_cache_layer.prefix, layer.compressed_cache_prefix)
    with forward_context(metadata), backend.recording() as calls:
        result = layer.forward(workload.qr, workload.kv, workload.positions, workload.latent)
    return RankRun(layer, workload, rank, calls, outputs, *caches, result)
