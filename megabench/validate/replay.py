"""The step once more at the same addresses, its inputs changed in place: what an engine's CUDA
graph does at every token.

On a GPU the step is captured before the change and replayed after it; elsewhere, and where it
cannot be captured, it is called again. Either way it must give what the same step gives at other
addresses, bit for bit: nothing may be left of the first inputs, in a graph, on the host or behind a
pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megabench.devices import first_cause
from megabench.layer import DeepseekV4MegaAttnAttention
from megabench.metadata import DeepseekSparseSWAMetadata, DeepseekV4FlashMLAMetadata
from megabench.validate.device import taken_error
from megabench.validate.judgement import Judgement, judge_same
from megabench.validate.poison import POISONS
from megabench.validate.step import Buffers, forward, ready
from megabench.workload import Workload, bind
from reference.layouts import output_meaning

STAGE = "replay"
_last_graph: list[torch.cuda.CUDAGraph] = []
"""Kept until the next is captured, so that graphs share one pool of memory."""

Results = list[tuple[str, Tensor]]
Holder = TypeVar("Holder", Workload, DeepseekSparseSWAMetadata, DeepseekV4FlashMLAMetadata)


def replay(layer: DeepseekV4MegaAttnAttention, workload: Workload) -> Judgement:
    """replay: codes, scales, wo_a's and the layer's output over changed inputs. The layer has just
    run `workload`, which is changed."""
    poison = POISONS[1]
    buffers = Buffers.of(layer, poison)
    launch, note = _repeated(lambda: forward(layer, workload), workload.device)
    change(workload)
    move_pages(workload, layer)
    again = _results(layer, buffers, launch())
    elsewhere = moved(workload)
    bind(layer, elsewhere)
    ready(layer, elsewhere, poison)
    buffers = Buffers.of(layer, poison)
    right = _results(layer, buffers, forward(layer, elsewhere))
    pairs = [(name, got, golden) for (name, got), (_, golden) in zip(again, right, strict=True)]
    return replace(judge_same(STAGE, pairs), note=note)


def _repeated(step: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], Tensor], str]:
    """What runs a step again, a graph's replay where it can be captured; a note says which."""
    if device.type != "cuda":
        return step, "called again"
    side = _capture_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(side):
            graph.capture_begin(pool=_last_graph[0].pool() if _last_graph else None)
            try:
                result = step()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        taken_error()  # the capture's, which no op is to answer for
        _last_graph.clear()  # nor a later capture to find its pool half open
        return step, f"called again, for it cannot be captured: {first_cause(error)}"
    torch.cuda.current_stream(device).wait_stream(side)
    _last_graph[:] = [graph]

    def launch() -> Tensor:
        graph.replay()
        return result

    return launch, "a captured graph replayed"


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: memory is kept by stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def change(workload: Workload) -> None:
    """Other values of a step's inputs in place, within the contract: queries, rows and latents
    negated, positions and window lengths halved (a row that closes still does), half of each top-k
    list gone."""
    for values in (workload.qr, workload.kv, workload.latent):
        if values is not None:
            values.neg_()
    workload.positions.sub_(workload.positions // 4 * 2)
    lens = workload.swa_metadata.decode_swa_lens
    if lens is not None:
        lens.copy_((lens + 1) // 2)
    if workload.topk_indices is not None:
        rows = workload.topk_indices
        named = (rows >= 0).sum(-1, keepdim=True)
        column = torch.arange(rows.shape[1], device=rows.device)
        rows.masked_fill_(column >= (named + 1) // 2, -1)


def move_pages(workload: Workload, layer: DeepseekV4MegaAttnAttention) -> None:
    """Turn the order of pages round in every pool, the layer's copies too, as if an engine had
    dealt pages out anew: block tables, slots and windows follow, and mean the rows they meant."""
    swa, compressed = workload.swa_metadata, workload.compressed_metadata
    pools = workload.swa_cache, layer.swa_cache_layer.kv_cache
    _turn(pools, swa.block_table, (swa.slot_mapping, swa.decode_swa_indices))
    if compressed is not None and workload.compressed_cache is not None:
        pools = workload.compressed_cache, layer._compressed_kv_cache()
        _turn(pools, compressed.block_table, (compressed.slot_mapping,))


def _turn(pools: Sequence[Tensor], table: Tensor, lists: Sequence[Tensor | None]) -> None:
    """Page b of equal pools [blocks, page, bytes] becomes page blocks - 1 - b, in place."""
    blocks, page = pools[0].shape[:2]
    for pool in pools:
        pool.copy_(pool.flip(0))
    table.copy_(blocks - 1 - table)
    for slots in lists:
        if slots is not None:
            inside = (slots >= 0) & (slots < blocks * page)
            turned = (blocks - 1 - slots // page) * page + slots % page
            slots.copy_(torch.where(inside, turned, slots))


def moved(workload: Workload) -> Workload:
    """The same step at other addresses; caches stay, for a layer is bound to copies of them."""
    compressed = workload.compressed_metadata
    return replace(
        _cloned(workload),
        swa_metadata=_cloned(workload.swa_metadata),
        compressed_metadata=None if compressed is None else _cloned(compressed),
    )


def _cloned(holder: Holder) -> Holder:
    values = {field.name: getattr(holder, field.name) for field in fields(holder) if field.init}
    copies = {
        name: value.clone()
        for name, value in values.items()
        if isinstance(value, Tensor) and not name.endswith("_cache")
    }
    return cast(Holder, replace(cast(Any, holder), **copies))


def _results(layer: DeepseekV4MegaAttnAttention, buffers: Buffers, output: Tensor) -> Results:
    """What the last run of a step wrote; a copy of what the layer returned, whose memory may be the
    next run's."""
    pair, groups = buffers.outputs[-1].pair, layer.n_local_groups
    codes, scales = output_meaning(pair.data[:, :groups], pair.scale[:, :groups])
    named = [("codes", codes), ("scales", scales), ("output", output.clone())]
    if buffers.latents:
        named.append(("wo_a", buffers.latents[-1].tensor))
    return named
