"""Which rows a token attends to, and how the prefill is cut into chunks (contract, section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PREFILL_CHUNK_SIZE = 4


def slots_of(rows: Tensor, request: Tensor, block_table: Tensor, page: int) -> Tensor:
    """Request-local row numbers ``[T, n]`` -> slots int64 ``[T, n]``.

    ``request [T]`` picks the row of ``block_table [R, B]``. A negative row number gives -1; so does
    a page past the table.
    """
    rows = rows.long()
    inside = (rows >= 0) & (rows < block_table.shape[1] * page)
    rows = torch.where(inside, rows, 0)
    block = block_table.long()[request.long()[:, None], rows // page]
    return torch.where(inside, block * page + rows % page, -1)


def decode_swa(
    positions: Tensor,
    block_table: Tensor,
    req_of_token: Tensor,
    page: int,
    window: int = 128,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Slots of positions [max(0, p - window + 1), p], ascending, then -1.

    int32 ``[T, window]`` and lens int32 ``[T]``. Tokens that are not ``valid [T]`` get length 0 and
    a row of -1.
    """
    positions = positions.long()[:, None]
    first = (positions - window + 1).clamp(min=0)
    local = first + torch.arange(window, device=positions.device)
    keep = local <= positions
    if valid is not None:
        keep = keep & valid.bool()[:, None]
    slots = slots_of(torch.where(keep, local, -1), req_of_token, block_table, page)
    return slots.int(), keep.sum(-1).int()


def global_topk(
    topk: Tensor,
    req_of_token: Tensor,
    block_table: Tensor,
    page: int,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Request-local compressed rows ``[T, k]`` -> slots int32 ``[T, k]`` and lens int32 ``[T]``.

    Holes (-1) stay in place. A length is the number of non-negative entries of the row; padding
    tokens have length 0 and, here, a row of -1 (their row is unspecified).
    """
    keep = topk >= 0
    if valid is not None:
        keep = keep & valid.bool()[:, None]
    slots = slots_of(torch.where(keep, topk.long(), -1), req_of_token, block_table, page)
    return slots.int(), keep.sum(-1).int()


def prefill_combined(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    M: int,
    N: int,
) -> tuple[Tensor, Tensor]:
    """Workspace rows each token of a prefill chunk reads.

    int32 ``[T, width]`` padded with -1, and lens int32 ``[T]``. ``topk_indices [T, >= topk]``
    (ignored when ``ratio`` is 0), ``query_start_loc [R + 1]`` (its first entry is the chunk's first
    token), ``seq_lens [R]``, ``gather_lens [R]``; the workspace is ``[R, M, 512]`` with compressed
    rows at [0, N) and SWA rows from N. width = topk + window rounded up to 128.
    """
    device = topk_indices.device
    start = (query_start_loc - query_start_loc[0]).long().to(device)
    seq, gathered = seq_lens.long().to(device), gather_lens.long().to(device)
    query = start[1:] - start[:-1]
    request = torch.repeat_interleave(torch.arange(len(query), device=device), query)
    token = torch.arange(len(request), device=device)
    position = seq[request] - query[request] + token - start[request]
    gather_start = seq[request] - gathered[request]
    base = M * request

    count = (position + 1) // ratio if ratio else torch.zeros_like(position)
    count = count.clamp(min=0, max=topk)[:, None]
    first = torch.maximum((position - window + 1).clamp(min=0), gather_start)
    span = (position - first + 1)[:, None]

    width = -(-(topk + window) // 128) * 128
    column = torch.arange(width, device=device)[None]
    compressed = torch.full((len(request), width), -1, dtype=torch.long, device=device)
    if ratio and topk:
        local = topk_indices[:, :topk].long()
        named = (local >= 0) & (local < N)
        compressed[:, :topk] = torch.where(named, local + base[:, None], -1)
    sliding = (base + N + first - gather_start)[:, None] + column - count
    rows = torch.where(column < count, compressed, torch.where(column < count + span, sliding, -1))
    return rows.int(), (count + span)[:, 0].int()


class Chunk(NamedTuple):
    """Prefill requests [start, end) run together over a ``[end - start, M, 512]`` workspace."""

    start: int
    end: int
    N: int
    M: int


def chunk_limit(ratio: int, max_model_len: int, window: int, max_num_batched_tokens: int) -> int:
    """Rows the prefill workspace holds."""
    compressed = -(-max_model_len // ratio) if ratio else 0
    return PREFILL_CHUNK_SIZE * (compressed + window + max_num_batched_tokens)


def prefill_plan(
    seq_lens: Sequence[int],
    gather_lens: Sequence[int],
    ratio: int,
    max_model_len: int,
    window: int,
    max_num_batched_tokens: int,
) -> list[Chunk]:
    """Cut prefill requests into chunks.

    Greedy: a chunk grows while requests · (max compressed + max gather) stays within the limit.
    """
    limit = chunk_limit(ratio, max_model_len, window, max_num_batched_tokens)
    compressed = [s // ratio if ratio else 0 for s in seq_lens]
    chunks: list[Chunk] = []
    start = 0
    while start < len(seq_lens):
        end = start + 1
        while end < len(seq_lens):
            rows = max(compressed[start : end + 1]) + max(gather_lens[start : end + 1])
            if (end + 1 - start) * rows > limit:
                break
            end += 1
        N = max(compressed[start:end])
        chunks.append(Chunk(start, end, N, N + max(gather_lens[start:end])))
        start = end
    return chunks
