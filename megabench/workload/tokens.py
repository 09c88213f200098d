"""Per-token parts of a step: positions, owners, top-k rows, sinks, and the step's metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megabench.cases import Request, Sink
from megabench.formats import COMPRESSED_BLOCK, SWA_PAGE
from megabench.hashing import Stream
from megabench.metadata import DeepseekSparseSWAMetadata, DeepseekV4FlashMLAMetadata
from megabench.workload.paging import Pool, Rows

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Tokens:
    """The tokens of a step on the CPU: decodes (padding last among them), then prefills."""

    requests: Sequence[Request]
    query_start_loc: torch.Tensor
    """int32 [requests + 1], padding not counted."""
    request: torch.Tensor
    """int64 [T]; 0 for padding tokens."""
    position: torch.Tensor
    """int64 [T]; 0 for padding tokens."""
    valid: torch.Tensor
    """bool [T]"""

    @property
    def num_decodes(self) -> int:
        return sum(request.is_decode for request in self.requests)

    @property
    def num_decode_tokens(self) -> int:
        decoded = int(self.query_start_loc[self.num_decodes])
        return decoded + int((~self.valid).sum())

    def rows(self) -> Rows:
        """Each token's own (request, position)."""
        return Rows(self.request, self.position)


def lay_out_tokens(requests: Sequence[Request], padding_tokens: int) -> Tokens:
    """Token order of a step; padding tokens follow its decodes (there are no prefills then)."""
    lengths = torch.tensor([r.query_len for r in requests], dtype=torch.int64)
    prefixes = torch.tensor([r.prefix_len for r in requests], dtype=torch.int64)
    starts = torch.zeros(len(requests) + 1, dtype=torch.int64)
    starts[1:] = torch.cumsum(lengths, 0)
    owner = torch.repeat_interleave(torch.arange(len(requests)), lengths)
    position = torch.arange(len(owner)) - starts[owner] + prefixes[owner]
    padding = torch.zeros(padding_tokens, dtype=torch.int64)
    return Tokens(
        requests,
        starts.to(torch.int32),
        torch.cat((owner, padding)),
        torch.cat((position, padding)),
        torch.arange(len(owner) + padding_tokens) < len(owner),
    )


def top_k_rows(
    tokens: Tokens, ratio: int, topk: int, stream: Stream, device: torch.device
) -> torch.Tensor:
    """int32 [T, topk] of request-local compressed rows, distinct, in hashed order, then -1.

    A token at position p takes k = min((p + 1) // ratio, topk) of the rows closed by then, one from
    each of k equal strata, so that near and far rows are both named. Padding tokens take none.
    """
    closed = torch.where(tokens.valid, (tokens.position + 1) // ratio, 0).to(device)[:, None]
    taken = closed.clamp_max(topk)
    column = torch.arange(topk, device=device)
    first = column * closed // taken.clamp_min(1)
    width = ((column + 1) * closed // taken.clamp_min(1) - first).clamp_min(1)
    rows = first + stream.below(width)
    order_words = Stream.of(*stream.key, "order").words(*rows.shape, device=device)
    order = (order_words & 0x7FFFFFFF).to(torch.int64) * topk + column
    inside = column < taken
    order = torch.where(inside, order, _LAST - topk + column)
    shuffled = torch.where(inside, rows, -1).gather(1, torch.argsort(order, dim=1))
    return shuffled.to(torch.int32)


def valid_keys(tokens: Tokens, window: int, ratio: int, topk: int) -> torch.Tensor:
    """int64 [T]: keys each token attends to; 0 for padding tokens."""
    seen = tokens.position + 1
    compressed = (seen // ratio).clamp_max(topk) if ratio else 0
    return torch.where(tokens.valid, seen.clamp_max(window) + compressed, 0)


def sinks(kind: Sink, keys: torch.Tensor, heads: int, stream: Stream) -> torch.Tensor:
    """float32 [heads] on the CPU, where its one logarithm is taken.

    matched: ln(mean keys) + N(0, 1), distinct per head: about half of each head's weight, so that a
    wrong, missing or doubled sink shows. inf: +inf and -inf heads among matched ones; large: far
    above and far below any score among matched ones.
    """
    device = torch.device("cpu")
    counted = keys[keys > 0]
    mean = float(counted.to(torch.float64).mean()) if len(counted) else 1.0
    matched = math.log(mean) + stream.normals(heads, device=device).to(torch.float64)
    head = torch.arange(heads)
    infinity, huge = math.inf, 1e4
    match kind:
        case "none":
            matched.fill_(-infinity)
        case "zero":
            matched.zero_()
        case "inf":
            matched[head % 4 == 1] = infinity
            matched[head % 4 == 3] = -infinity
        case "large":
            matched[head % 4 == 1] = huge
            matched[head % 4 == 2] += 60.0
            matched[head % 4 == 3] = -huge
    return matched.to(torch.float32)


def swa_metadata(
    tokens: Tokens, pool: Pool, window: int, max_model_len: int, device: torch.device
) -> DeepseekSparseSWAMetadata:
    """The step as the sliding-window cache sees it."""
    decodes, decoded = tokens.num_decodes, tokens.num_decode_tokens
    prefills = tokens.requests[decodes:]
    seq_lens = [request.seq_len for request in prefills]
    gather_lens = [r.query_len + min(r.prefix_len, window - 1) for r in prefills]
    indices, lens = _decode_windows(tokens, pool, window, decoded)
    slots = _slots(pool, tokens.rows(), tokens.valid)

    def moved(values: list[int]) -> torch.Tensor | None:
        return torch.tensor(values, dtype=torch.int32, device=device) if values else None

    return DeepseekSparseSWAMetadata(
        num_decodes=decodes,
        num_decode_tokens=decoded,
        num_prefills=len(prefills),
        num_prefill_tokens=len(tokens.position) - decoded,
        query_start_loc=tokens.query_start_loc.to(device),
        query_start_loc_cpu=tokens.query_start_loc,
        block_table=pool.table.to(device),
        block_size=SWA_PAGE,
        slot_mapping=slots.to(device),
        token_to_req_indices=tokens.request.to(torch.int32).to(device),
        is_valid_token=tokens.valid.to(device),
        decode_swa_indices=indices.to(device) if decoded else None,
        decode_swa_lens=lens.to(device) if decoded else None,
        prefill_seq_lens=moved(seq_lens),
        prefill_gather_lens=moved(gather_lens),
        prefill_seq_lens_cpu=seq_lens,
        prefill_gather_lens_cpu=gather_lens,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(len(tokens.position), 1),
        window_size=window,
    )


def _slots(pool: Pool, rows: Rows, keep: torch.Tensor) -> torch.Tensor:
    """Slots of rows, -1 where not kept (whose rows may name no request)."""
    device = pool.table.device
    keep = keep.to(device)
    slots = torch.full((len(rows.row),), -1, dtype=torch.int64, device=device)
    slots[keep] = pool.slots(rows.to(device).where(keep))
    return slots


def _decode_windows(
    tokens: Tokens, pool: Pool, window: int, decoded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [decoded, window] slots of [max(0, pos - window + 1), pos], then -1; int32 lengths."""
    device = pool.table.device
    position, valid, request = (
        part[:decoded].to(device) for part in (tokens.position, tokens.valid, tokens.request)
    )
    column = torch.arange(window, device=device)
    lens = torch.where(valid, (position + 1).clamp_max(window), 0)
    row = (position + 1 - lens)[:, None] + column
    inside = column < lens[:, None]
    owner = request[:, None].expand_as(row)
    slots = _slots(pool, Rows(owner.flatten(), row.flatten()), inside.flatten())
    return slots.view(row.shape).to(torch.int32), lens.to(torch.int32)


def compressed_metadata(
    tokens: Tokens, pool: Pool, ratio: int, device: torch.device
) -> DeepseekV4FlashMLAMetadata:
    """The step as the compressed cache sees it: a row closes at (position + 1) % ratio == 0."""
    closes = tokens.valid & ((tokens.position + 1) % ratio == 0)
    rows = Rows(tokens.request, tokens.position // ratio)
    return DeepseekV4FlashMLAMetadata(
        block_table=pool.table.to(device),
        block_size=COMPRESSED_BLOCK,
        slot_mapping=_slots(pool, rows, closes).to(device),
    )
