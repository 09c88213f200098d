"""Index lists in eager torch, without host syncs."""

from __future__ import annotations

import torch

from megabench.formats import COMBINED_TOPK_MULTIPLE, round_up


def global_topk(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot ids int32 [n, topk] of request-local rows [n, topk], holes in place, and lens int32 [n].

    block_size is rows a page. len = entries >= 0, and 0 for an invalid (padding) token.
    """
    tokens = topk_indices.shape[0]
    local = topk_indices.to(torch.int64)
    table = block_table[token_to_req_indices[:tokens].to(torch.int64)].to(torch.int64)
    named = local >= 0
    column = (local.clamp_min(0) // block_size).clamp_max(max(table.shape[1] - 1, 0))
    slots = torch.gather(table, 1, column) * block_size + local % block_size
    indices = torch.where(named, slots, -1).to(torch.int32)
    lens = named.sum(-1, dtype=torch.int32).masked_fill(~is_valid_token[:tokens], 0)
    return indices, lens


def combine_topk_swa(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a chunk's workspace each prefill token reads -> indices int32 [t, width], lens [t].

    topk_indices int32 [t, >= topk]; query_start_loc int32 [requests + 1] (any base); seq_lens and
    gather_lens int32 [requests]; the workspace holds M rows a request, compressed ones first (N),
    then the gathered SWA rows. Compressed columns come first, the window directly after them.
    """
    tokens, device = topk_indices.shape[0], topk_indices.device
    if out is None:
        width = round_up(topk + window_size, COMBINED_TOPK_MULTIPLE)
        out = (
            torch.empty((tokens, width), dtype=torch.int32, device=device),
            torch.empty(tokens, dtype=torch.int32, device=device),
        )
    if tokens == 0:
        return out
    starts = (query_start_loc - query_start_loc[0]).to(torch.int64)
    token = torch.arange(tokens, device=device)
    request = torch.searchsorted(starts, token, right=True) - 1
    seq_len, gather_len = seq_lens[request].to(torch.int64), gather_lens[request].to(torch.int64)
    position = seq_len - (starts[request + 1] - starts[request]) + token - starts[request]
    gather_start = seq_len - gather_len
    base = M * request
    k = torch.zeros_like(token)
    if compress_ratio:
        k = ((position + 1) // compress_ratio).clamp(0, topk)
    first = torch.maximum(position - window_size + 1, gather_start).clamp_min(0)
    length = k + (position - first + 1).clamp_min(0)

    column = torch.arange(out[0].shape[1], device=device)
    window_row = (base + N + first - gather_start - k).unsqueeze(1) + column
    rows = torch.where(column < length.unsqueeze(1), window_row, -1)
    if topk:
        local = topk_indices[:, :topk].to(torch.int64)
        compressed = torch.where((local >= 0) & (local < N), local + base.unsqueeze(1), -1)
        rows[:, :topk] = torch.where(column[:topk] < k.unsqueeze(1), compressed, rows[:, :topk])
    out[0].copy_(rows)
    out[1].copy_(length)
    return out
