"""Fused layouts of weights, Q and attention output, to and from natural order.

Natural order is head-major: ``[..., heads, 512]``. Every function here moves bytes and changes
none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .codes import as_bytes
from .model import HEADS_PER_GROUP

Q_CHUNK = 16
OUT_CHUNK = 32


def _fuse_rows(t: Tensor, heads: int) -> Tensor:
    """``[H * 512, ...]`` -> same shape.

    Row (d // 16)·(H·16) + h·16 + d % 16 is standard h·512 + d.
    """
    return torch.unflatten(t, 0, (heads, -1, Q_CHUNK)).transpose(0, 1).flatten(0, 2)


def fuse_wq_b(w: Tensor, s: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """wq_b ``w [H * 512, r]``, per-row scales ``s [H * 512, r/32]`` in the kernel's row order.

    ``heads`` is the rank's *live* head count.
    """
    return _fuse_rows(w, heads), _fuse_rows(s, heads)


def fuse_wo_a(w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """wo_a ``w [G, d, 4096]``, ``s [G, d, 128]`` in the kernel's column order.

    Column (c·8 + h)·32 + j is standard h·512 + c·32 + j. Scales move with their chunk of 32
    columns.
    """
    chunks = torch.unflatten(w, -1, (HEADS_PER_GROUP, -1, OUT_CHUNK)).transpose(-3, -2).flatten(-3)
    scales = torch.unflatten(s, -1, (HEADS_PER_GROUP, -1)).transpose(-2, -1).flatten(-2)
    return chunks, scales


def heads_from_fused_q(q: Tensor, heads: int) -> Tensor:
    """Output of the Q GEMM with fused rows ``[T, H * 512]`` -> ``[T, H, 512]`` in natural order."""
    return torch.unflatten(q, -1, (-1, heads, Q_CHUNK)).transpose(-3, -2).flatten(-2)


def fused_from_heads(heads: Tensor) -> Tensor:
    """Inverse of :func:`heads_from_fused_q`: ``[T, H, 512]`` -> ``[T, H * 512]``."""
    return torch.unflatten(heads, -1, (-1, Q_CHUNK)).transpose(-3, -2).flatten(-3)


def pad_q(heads: Tensor, padded: int) -> Tensor:
    """Natural ``[T, H, 512]`` -> kernel layout ``[T, padded, 512]``.

    32 chunks of [padded, 16], zero-filled.
    """
    tokens, live, dim = heads.shape
    full = torch.cat([heads, heads.new_zeros(tokens, padded - live, dim)], dim=1)
    return fused_from_heads(full).view(tokens, padded, dim)


def heads_from_padded_q(q: Tensor, live: int) -> Tensor:
    """Kernel layout ``[T, padded, 512]`` -> natural order of the live heads ``[T, live, 512]``."""
    return heads_from_fused_q(q.flatten(1), q.shape[1])[:, :live]


def output_meaning(out_fp8: Tensor, out_sf: Tensor) -> tuple[Tensor, Tensor]:
    """Attention output as written -> codes uint8 ``[T, G * 8, 512]``, scales uint8
    ``[T, G * 8, 16]``.

    ``out_fp8`` is one byte wide ``[T, G, 4096]``, ``out_sf`` int32 ``[T, G, 32]`` of any strides;
    byte b of word w (little endian) scales chunk 4w + b = c·8 + h.
    """
    codes = torch.unflatten(as_bytes(out_fp8), -1, (-1, HEADS_PER_GROUP, OUT_CHUNK)).transpose(
        -3, -2
    )
    shifts = torch.arange(0, 32, 8, device=out_sf.device, dtype=torch.int32)
    scales = ((out_sf.unsqueeze(-1) >> shifts) & 255).to(torch.uint8).flatten(-2)
    scales = torch.unflatten(scales, -1, (-1, HEADS_PER_GROUP)).transpose(-2, -1)
    return codes.flatten(-2).flatten(1, 2), scales.flatten(1, 2)


def output_from_meaning(
    codes: Tensor, scales: Tensor, step_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`output_meaning`, with MN-major scales.

    ``out_sf`` has strides (1, 32·stride, stride) with stride = ceil4(step_tokens or T).
    """
    tokens, dim = codes.shape[0], codes.shape[-1]
    grouped = torch.unflatten(codes, 1, (-1, HEADS_PER_GROUP))
    out = torch.unflatten(grouped, -1, (-1, OUT_CHUNK)).transpose(2, 3).flatten(2)
    chunks = torch.unflatten(scales, 1, (-1, HEADS_PER_GROUP)).transpose(2, 3).flatten(2)
    words = torch.unflatten(chunks, -1, (-1, 4)).contiguous().view(torch.int32).squeeze(-1)
    stride = -(-(tokens if step_tokens is None else step_tokens) // 4) * 4
    per_group = HEADS_PER_GROUP * dim // OUT_CHUNK // 4
    shape = (tokens, out.shape[1], per_group)
    sf = torch.empty_strided(
        shape, (1, per_group * stride, stride), dtype=torch.int32, device=codes.device
    )
    return out.contiguous(), sf.copy_(words)
