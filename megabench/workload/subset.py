"""Some of a step's requests as a step of their own: the same bytes in another batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megabench.formats import COMPRESSED_BLOCK, FP8, SWA_PAGE, KVRecord
from megabench.workload.build import Workload
from megabench.workload.paging import Pool
from megabench.workload.tokens import compressed_metadata, lay_out_tokens, swa_metadata


def tokens_of(workload: Workload, order: Sequence[int]) -> torch.Tensor:
    """int64 [n], on the CPU: where in the step the tokens of the requests `order` are."""
    starts = lay_out_tokens(workload.requests, 0).query_start_loc.tolist()
    rows = [torch.arange(starts[request], starts[request + 1]) for request in order]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)


def subset(workload: Workload, order: Sequence[int]) -> Workload:
    """A step of the requests `order` (decodes before prefills) of `workload`, without padding
    tokens. Caches are shared: a layer is bound to copies of them."""
    device = workload.device
    tokens = lay_out_tokens([workload.requests[request] for request in order], 0)
    at = tokens_of(workload, order).to(device)
    chosen = torch.tensor(list(order), dtype=torch.int64)
    window, ratio = workload.geometry.window_size, workload.case.compress_ratio

    def pool(cache: torch.Tensor, table: torch.Tensor, page: int, record: KVRecord) -> Pool:
        own = table.cpu()[chosen]
        return Pool(cache, own, page, record, workload.case.page_layout)

    swa_pool = pool(workload.swa_cache, workload.swa_block_table, SWA_PAGE, FP8)
    swa = swa_metadata(tokens, swa_pool, window, workload.max_model_len, device)
    compressed, table = None, workload.compressed_block_table
    if workload.compressed_cache is not None and table is not None:
        page, record = COMPRESSED_BLOCK // ratio, workload.case.record
        parts = pool(workload.compressed_cache, table, page, record)
        compressed = compressed_metadata(tokens, parts, ratio, device)

    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[at]

    return replace(
        workload,
        requests=list(tokens.requests),
        positions=workload.positions[at],
        qr=workload.qr[at],
        kv=workload.kv[at],
        latent=rows(workload.latent),
        topk_indices=rows(workload.topk_indices),
        swa_block_table=swa.block_table,
        compressed_block_table=None if compressed is None else compressed.block_table,
        swa_metadata=swa,
        compressed_metadata=compressed,
        token_to_req=swa.token_to_req_indices,
        is_valid=swa.is_valid_token,
        max_num_batched_tokens=swa.max_num_batched_tokens,
    )
