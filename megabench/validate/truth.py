"""What a case means: every position, slot, list and chunk, derived by golden code.

Nothing here is read from what the layer passed to an op, so a layer that passes a wrong position or
slice is caught by the stage that needed the right one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megabench.cases.case import read_model_config
from megabench.workload import Workload
from reference import indices
from reference.cache import InsertedRows, inserted_rows, rope_positions
from reference.indices import Chunk
from reference.layer import Request, Selected, Tokens, tokens_of
from reference.model import Model, from_config
from reference.rope import cos_sin_table


class Prefill(NamedTuple):
    """One chunk of prefill requests. Tensors on the CPU except `topk`."""

    chunk: Chunk
    tokens: slice
    """Of the step."""
    requests: range
    """Of the step."""
    query_start_loc: Tensor
    seq_lens: Tensor
    gather_lens: Tensor


@dataclass(frozen=True)
class Truth:
    """A case's meaning, for every rank alike. T tokens; tensors on the workload's device."""

    workload: Workload
    model: Model
    ratio: int
    layout: str
    tokens: Tokens
    decode_tokens: int
    """Padding included: it follows the decodes."""
    swa_slots: Tensor
    """int64 [T]: where each token's K/V row goes, -1 for padding."""
    compressed_slots: Tensor | None
    """int64 [T]: where the compressed row that closes at a token goes, else -1."""
    swa_selected: Selected
    compressed_selected: Selected | None
    chunks: list[Prefill]
    needed_positions: Tensor
    """int64 [n]: every position that something is rotated at."""
    golden_rotation: Tensor
    """float32 [n, 64]: golden's cos/sin rows of `needed_positions`."""

    _inserted: dict[bool, tuple[Tensor, InsertedRows]] = field(default_factory=dict)

    def inserted(self, compressed: bool, table: Tensor) -> InsertedRows:
        """Records that the step's tokens insert, rotated by `table` [P, 64]; the same for every
        rank whose table is the same."""
        rotation = table[self.needed_positions]
        known = self._inserted.get(compressed)
        if known is None or not torch.equal(known[0], rotation):
            work = self.workload
            rows, cache, ratio = work.kv, work.swa_cache, None
            if compressed:
                assert work.latent is not None
                assert work.compressed_cache is not None
                rows, cache, ratio = work.latent, work.compressed_cache, self.ratio
            made = inserted_rows(rows, self.tokens.position, table, cache.shape[-1], ratio)
            known = self._inserted[compressed] = rotation, made
        return known[1]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.position)

    def phases(self) -> dict[str, slice]:
        """The step's decode and prefill tokens, those that there are."""
        parts = {
            "decode": slice(0, self.decode_tokens),
            "prefill": slice(self.decode_tokens, self.num_tokens),
        }
        return {name: part for name, part in parts.items() if part.stop > part.start}


def truth_of(workload: Workload) -> Truth:
    """Derive a case's meaning. ValueError when the workload's own tokens contradict it."""
    case, device = workload.case, workload.device
    requests = [Request(r.query_len, r.seq_len, r.is_decode) for r in case.requests]
    tokens = Tokens(*(t.to(device) for t in tokens_of(requests, case.num_tokens)))
    if not torch.equal(tokens.position, workload.positions):
        raise ValueError(f"{case.id}: the workload's positions are not the case's")
    model = from_config(read_model_config(case.model))
    decoded = int(tokens.is_decode.sum()) + int((~tokens.valid).sum())
    rotated = [tokens.position, rope_positions(tokens.position, case.compress_ratio or None)]
    needed = torch.unique(torch.cat(rotated))
    compressed_slots, compressed_selected = _compressed(workload, tokens)
    return Truth(
        workload=workload,
        model=model,
        ratio=case.compress_ratio,
        layout=case.page_layout,
        tokens=tokens,
        decode_tokens=decoded,
        swa_slots=_slots(
            tokens, tokens.position, tokens.valid, workload.swa_block_table, workload.swa_cache
        ),
        compressed_slots=compressed_slots,
        swa_selected=Selected(
            *indices.decode_swa(
                tokens.position,
                workload.swa_block_table,
                tokens.request,
                workload.swa_cache.shape[1],
                model.sliding_window,
                tokens.valid,
            )
        ),
        compressed_selected=compressed_selected,
        chunks=_chunks(workload, requests, model, decoded),
        needed_positions=needed,
        golden_rotation=cos_sin_table(needed, case.compress_ratio != 0, model),
    )


def _slots(tokens: Tokens, rows: Tensor, keep: Tensor, table: Tensor, cache: Tensor) -> Tensor:
    local = torch.where(keep, rows, -1)[:, None]
    return indices.slots_of(local, tokens.request, table, cache.shape[1])[:, 0]


def _compressed(workload: Workload, tokens: Tokens) -> tuple[Tensor | None, Selected | None]:
    """Where compressed rows go, and which ones each token reads.

    A decode reads its whole list; a prefill the columns its position allows.
    """
    cache, table, topk = (
        workload.compressed_cache,
        workload.compressed_block_table,
        workload.topk_indices,
    )
    ratio = workload.case.compress_ratio
    if cache is None or table is None or topk is None:
        return None, None
    closing = tokens.valid & ((tokens.position + 1) % ratio == 0)
    slots = _slots(tokens, tokens.position // ratio, closing, table, cache)
    lengths = torch.tensor([r.seq_len for r in workload.requests], device=topk.device)
    held = (lengths // ratio)[tokens.request][:, None] if len(lengths) else topk[:, :1]
    decode = tokens.is_decode
    local = torch.where(decode[:, None] | (topk < held), topk, -1)
    rows, lens = indices.global_topk(local, tokens.request, table, cache.shape[1], tokens.valid)
    allowed = ((tokens.position + 1) // ratio).clamp(max=topk.shape[1]) * tokens.valid
    return slots, Selected(rows, torch.where(decode, lens, allowed.int()))


def _chunks(
    workload: Workload, requests: list[Request], model: Model, decoded: int
) -> list[Prefill]:
    prefills = [r for r in requests if not r.is_decode]
    decodes = len(requests) - len(prefills)
    reach = model.sliding_window - 1
    gathers = [r.query_len + min(r.seq_len - r.query_len, reach) for r in prefills]
    lengths = [r.seq_len for r in prefills]
    starts = torch.tensor([0, *(r.query_len for r in prefills)]).cumsum(0)
    plan = indices.prefill_plan(
        lengths,
        gathers,
        workload.case.compress_ratio,
        workload.max_model_len,
        model.sliding_window,
        workload.max_num_batched_tokens,
    )
    return [
        Prefill(
            chunk,
            slice(decoded + int(starts[chunk.start]), decoded + int(starts[chunk.end])),
            range(decodes + chunk.start, decodes + chunk.end),
            starts[chunk.start : chunk.end + 1],
            torch.tensor(lengths[chunk.start : chunk.end]),
            torch.tensor(gathers[chunk.start : chunk.end]),
        )
        for chunk in plan
    ]
