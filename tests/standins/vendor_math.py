"""What the vendor's ops compute, from the golden model alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference.attention import Attended, attend
from reference.cast import cast_output
from reference.layouts import fuse_wo_a, fuse_wq_b, heads_from_padded_q, output_from_meaning
from reference.quantize import dequantize_mxfp8
from reference.rows import Paged, Rows, paged_rows, workspace_rows


def _lens(length: Tensor | None, indices: Tensor) -> Tensor:
    return torch.full((len(indices),), indices.shape[-1]) if length is None else length


def _attend(a: dict[str, Any], rows: Rows) -> Attended:
    q = a["q"]
    sinks = a["attn_sink"]
    return attend(
        heads_from_padded_q(q, q.shape[1]),
        a["token_positions"],
        a["cos_sin_cache"],
        rows,
        torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks,
        a["sm_scale"],
        q_norm_eps=a["rms_norm_eps"] if a["enable_q_norm"] else None,
        bounds=False,
    )


def _store(a: dict[str, Any], attended: Attended) -> list[Tensor]:
    out_fp8, out_sf = output_from_meaning(*cast_output(attended.o))
    out_fp8 = out_fp8.view(torch.float8_e4m3fn)
    if a.get("out_fp8") is not None:
        a["out_fp8"].view(torch.uint8).copy_(out_fp8.view(torch.uint8))
        a["out_sf"].copy_(out_sf)
        out_fp8, out_sf = a["out_fp8"], a["out_sf"]
    return [out_fp8, out_sf]


def decode(a: dict[str, Any]) -> list[Tensor]:
    """[out_fp8, out_sf, lse] of the decode op's arguments by name."""
    parts = [Paged(a["kv"], a["indices"], _lens(a["topk_length"], a["indices"]))]
    if a["extra_kv"] is not None:
        lens = _lens(a["extra_topk_length"], a["extra_indices"])
        parts.append(Paged(a["extra_kv"], a["extra_indices"], lens))
    attended = _attend(a, paged_rows(parts))
    return [*_store(a, attended), attended.lse]


def prefill(a: dict[str, Any]) -> list[Tensor]:
    """[out_fp8, out_sf, max_logits, lse] of the prefill op's arguments by name."""
    rows = workspace_rows(a["kv"], a["indices"], a["topk_length"])
    attended = _attend(a, rows)
    return [*_store(a, attended), attended.max_logits, attended.lse]


def scale_bytes(words: Tensor) -> Tensor:
    """ue8m0 bytes uint8 [..., 4w] of words int32 [..., w], little endian."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 255).to(torch.uint8).flatten(-2)


def _words(scales: Tensor) -> Tensor:
    """Words [..., rows, w] of bytes [..., rows, 4w], stride 1 and ceil4 along the rows."""
    words = scales.contiguous().view(torch.int32)
    rows = words.shape[-2]
    storage = torch.zeros(
        (*words.shape[:-2], words.shape[-1], -(-rows // 4) * 4), dtype=torch.int32
    )
    packed = storage.transpose(-1, -2)[..., :rows, :]
    packed.copy_(words)
    return packed


def permute_q_b(w: Tensor, sf: Tensor, h_q: int) -> list[Tensor]:
    weight, scale = fuse_wq_b(w.view(torch.uint8), scale_bytes(sf), h_q)
    return [weight.view(torch.float8_e4m3fn), _words(scale)]


def permute_wv(w: Tensor, sf: Tensor) -> list[Tensor]:
    weight, scale = fuse_wo_a(w.view(torch.uint8), scale_bytes(sf))
    return [weight.view(torch.float8_e4m3fn), _words(scale)]


def product(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor) -> Tensor:
    """float32 [..., m, n] of e4m3 x [..., m, k] and w [..., n, k] with their packed scales."""
    chunks = x.shape[-1] // 32
    a = dequantize_mxfp8(x.contiguous().view(torch.uint8), scale_bytes(sx)[..., :chunks])
    b = dequantize_mxfp8(w.contiguous().view(torch.uint8), scale_bytes(sw)[..., :chunks])
    return a @ b.transpose(-1, -2)
