"""A `flash_mla` of the vendor's signatures that computes with the golden model's parts."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from reference.records import decode_slots
from reference.rows import named_rows

Tensor = torch.Tensor


def _softmax(q: Tensor, rows: Tensor, valid: Tensor, scale: float, sink: Tensor) -> Tensor:
    rows = torch.where(valid[..., None], rows, 0.0).double()
    score = torch.einsum("thd,tkd->thk", q.double(), rows) * scale
    score = score.masked_fill(~valid[:, None], -torch.inf)
    lse = torch.logsumexp(score, -1)
    o = torch.einsum("thk,tkd->thd", (score - lse[..., None]).exp(), rows)
    return (o * torch.sigmoid(lse - sink)[..., None]).bfloat16()


def _paged(cache: Tensor, indices: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    assert cache.shape[-1] == 584
    slots = indices.squeeze(1)
    valid = named_rows(slots, length, cache.shape[0] * cache.shape[1])
    return decode_slots(cache, torch.where(valid, slots, 0).long(), "page_split"), valid


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: None,
    cache_seqlens: None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    *,
    softmax_scale: float,
    is_fp8_kvcache: bool,
    indices: Tensor,
    topk_length: Tensor,
    attn_sink: Tensor,
    extra_k_cache: Tensor,
    extra_indices_in_kvcache: Tensor,
    extra_topk_length: Tensor,
    use_legacy: bool,
) -> tuple[Tensor, None]:
    assert use_legacy
    assert is_fp8_kvcache
    parts = [
        _paged(k_cache, indices, topk_length),
        _paged(extra_k_cache, extra_indices_in_kvcache, extra_topk_length),
    ]
    rows, valid = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return _softmax(q.squeeze(1), rows, valid, softmax_scale, attn_sink).unsqueeze(1), None


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: Tensor,
    topk_length: Tensor,
    use_legacy: bool,
) -> tuple[Tensor, None, None]:
    assert use_legacy
    listed = indices.squeeze(1)
    valid = named_rows(listed, topk_length, len(kv))
    rows = kv.squeeze(1)[torch.where(valid, listed, 0).long()].float()
    return _softmax(q, rows, valid, sm_scale, attn_sink), None, None


def module() -> ModuleType:
    """The stand-in, to be put in `sys.modules`."""
    made = ModuleType("flash_mla")
    vars(made).update(
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        flash_mla_sparse_fwd=flash_mla_sparse_fwd,
        get_mla_metadata=lambda: (object(), None),
        has_legacy=lambda: True,
    )
    return made
