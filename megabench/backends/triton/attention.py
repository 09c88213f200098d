"""Launchers of the fused attention: tile and split choice, outputs, kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
import triton

from megabench.backends.arguments import DecodeArguments, PrefillArguments
from megabench.backends.triton.combine import (
    COMBINE_DIMS,
    COMBINE_HEADS,
    COMBINE_WARPS,
    combine_kernel,
)
from megabench.backends.triton.decode import decode_kernel
from megabench.backends.triton.pages import Pages, pages_of
from megabench.backends.triton.prefill import prefill_kernel
from megabench.backends.triton.target import Target, target_of
from megabench.formats import HEAD_DIM, NVFP4, KVRecord, PageLayout

LOG2_E = 1.4426950408889634
SM90_PREFILL_HEADS, SM90_PREFILL_TOKENS = 16, 512
"""With so few live heads and so many tokens a 16-head tile beats the 64-head warp-specialized
prefill: 228 against 266 us at 1024 tokens, but 54 against 41 us at 128."""
GLUON = find_spec("triton.experimental.gluon") is not None
"""Gluon is an experimental part of Triton, so another version may lack it."""


@dataclass(frozen=True)
class Tile:
    """Heads and rows a program works on, and how it is compiled."""

    heads: int
    rows: int
    warps: int
    stages: int
    resident: int = 1
    """Programs of it that fit a multiprocessor."""


def decode_tile(tokens: int, live_heads: int, extra: KVRecord | None, target: Target) -> Tile:
    """A decode tile that fits the target; the fastest measured on an H200 for SM90
    (docs/kernels.md, `scripts/device/triton_bench.py --what decode-tiles`).

    Few tokens spread their heads over the device; NVFP4 rows, which take longer to convert, are
    shared by more heads sooner. Ampere and the 99 KB parts take a tile whose accumulator fits their
    registers.
    """
    hopper = target.capability == 90
    fp4 = extra is NVFP4
    if tokens * live_heads <= 64 or (live_heads <= 16 and not (hopper and fp4 and tokens > 64)):
        return Tile(heads=16, rows=32, warps=4, stages=1, resident=2)
    if tokens <= 8 or target.capability not in (90, 100, 103):
        return Tile(heads=32, rows=32, warps=8, stages=1)
    if hopper and live_heads <= 32 and tokens <= 32 and not fp4:
        return Tile(heads=32, rows=32, warps=8, stages=1)
    if hopper and extra:
        return Tile(heads=64, rows=128, warps=8, stages=1)
    return Tile(heads=64, rows=64, warps=8, stages=1)


def prefill_tile(live_heads: int, target: Target) -> Tile:
    """A prefill tile that fits the target's shared memory and registers."""
    if target.narrow:
        return Tile(heads=16, rows=32, warps=8, stages=1)
    if live_heads <= 16:
        return Tile(heads=16, rows=32, warps=4, stages=2)
    if live_heads <= 32 or target.capability == 80:
        return Tile(heads=32, rows=64, warps=8, stages=1)
    return Tile(heads=64, rows=64, warps=8, stages=1)


def split_count(programs: int, row_tiles: int, resident: int, target: Target) -> int:
    """Shares of a token's rows such that `programs` times as many fill the device, `resident` a
    multiprocessor, balanced to whole tiles."""
    wanted = resident * target.multiprocessors // max(programs, 1)
    share = -(-max(row_tiles, 1) // max(min(wanted, row_tiles), 1))
    return -(-max(row_tiles, 1) // share)


def decode(
    args: DecodeArguments,
    layout: PageLayout,
    live_heads: int | None = None,
    splits: int | None = None,
) -> list[torch.Tensor]:
    """[out_fp8, out_sf, lse] of the decode op on checked arguments.

    live_heads: heads whose results matter (default all); splits: shares of a token's rows (default:
    enough to fill the device).
    """
    q, kv, indices = args.q, args.kv, args.indices
    extra_kv, extra_indices = args.extra_kv, args.extra_indices
    s_q, heads, _ = q.shape
    out, lse = args.output(), args.empty_lse()
    if s_q == 0:
        return [out.data, out.scale, lse]
    target = target_of(q.device)
    live = live_heads or heads
    swa = pages_of(kv, layout)
    extra = pages_of(extra_kv, layout) if extra_kv is not None else None
    tile = decode_tile(s_q, live, extra.record if extra else None, target)
    head_tiles = triton.cdiv(live, tile.heads)
    # An empty pool has no slot 0 for masked rows to read.
    topk = indices.shape[1] if swa.slots else 0
    extra_topk = (
        extra_indices.shape[1] if extra and extra.slots and extra_indices is not None else 0
    )
    if splits is None:
        row_tiles = triton.cdiv(topk, tile.rows) + triton.cdiv(extra_topk, tile.rows)
        splits = split_count(s_q * head_tiles, row_tiles, tile.resident, target)
    # Partials come from the caching allocator: no cudaMalloc once warm, and a captured graph owns
    # its own; a buffer kept here would be shared between streams.
    partial, partial_ml = lse, lse
    if splits > 1:
        partial = q.new_empty((s_q, splits, heads, HEAD_DIM), dtype=torch.float32)
        partial_ml = q.new_empty((s_q, splits, heads, 2), dtype=torch.float32)
    epilogue = (
        out.data.view(torch.uint8),
        out.scale,
        out.scale.stride(1),
        out.scale.stride(2),
        lse,
    )
    decode_kernel[(s_q, head_tiles * splits)](
        q,
        q.stride(0),
        kv.view(torch.uint8),
        kv.stride(0),
        swa.slots,
        indices,
        indices.stride(0),
        args.topk_length,
        topk,
        (kv if extra_kv is None else extra_kv).view(torch.uint8),
        extra_kv.stride(0) if extra_kv is not None else 0,
        extra.slots if extra else 0,
        extra_indices if extra else indices,
        extra_indices.stride(0) if extra_indices is not None else 0,
        args.extra_topk_length,
        extra_topk,
        1,
        args.attn_sink,
        args.token_positions,
        args.cos_sin_cache,
        args.sm_scale * LOG2_E,
        args.q_norm_eps or 0.0,
        *epilogue,
        partial,
        partial_ml,
        HEADS=heads,
        H=tile.heads,
        N=tile.rows,
        SPLITS=splits,
        **_page_constants("", swa),
        HAS_EXTRA=extra is not None and extra_topk > 0,
        EXTRA_FP4=extra is not None and extra.record is NVFP4,
        **_page_constants("EXTRA_", extra or swa),
        HAS_LEN=args.topk_length is not None,
        HAS_EXTRA_LEN=args.extra_topk_length is not None,
        HAS_SINK=args.attn_sink is not None,
        Q_NORM=args.q_norm_eps is not None,
        EMULATE=target.emulate,
        FP8_CVT=target.fp8_cvt,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        grid = (s_q, triton.cdiv(live, COMBINE_HEADS), HEAD_DIM // COMBINE_DIMS)
        combine_kernel[grid](
            partial,
            partial_ml,
            args.attn_sink,
            args.token_positions,
            args.cos_sin_cache,
            *epilogue,
            HEADS=heads,
            H=COMBINE_HEADS,
            W=COMBINE_DIMS,
            SPLITS=splits,
            HAS_SINK=args.attn_sink is not None,
            FP8_CVT=target.fp8_cvt,
            num_warps=COMBINE_WARPS,
        )
    return [out.data, out.scale, lse]


def _page_constants(prefix: str, pages: Pages) -> dict[str, int]:
    """The kernel's compile-time page addressing, for the SWA ("") or the extra cache ("EXTRA_")."""
    _, page_size, data_pitch, scale_base, scale_pitch = pages.addressing
    return {
        f"{prefix}PAGE": page_size,
        f"{prefix}DATA_PITCH": data_pitch,
        f"{prefix}SCALE_BASE": scale_base,
        f"{prefix}SCALE_PITCH": scale_pitch,
    }


def _fits_sm90(args: PrefillArguments, live: int, target: Target) -> bool:
    """Whether the warp-specialized prefill is the one for a call: it has no Q norm and copies 16
    bytes."""
    return (
        GLUON
        and target.capability == 90
        and args.q_norm_eps is None
        and (live > SM90_PREFILL_HEADS or len(args.q) < SM90_PREFILL_TOKENS)
        and args.kv.data_ptr() % 16 == 0
    )


def prefill(args: PrefillArguments, live_heads: int | None = None) -> list[torch.Tensor]:
    """[out_fp8, out_sf, max_logits, lse] of the prefill op on checked arguments."""
    q, kv, indices = args.q, args.kv, args.indices
    s_q, heads, _ = q.shape
    out, lse, max_logits = args.output(), args.empty_lse(), args.empty_lse()
    if s_q == 0:
        return [out.data, out.scale, max_logits, lse]
    target = target_of(q.device)
    live = live_heads or heads
    outputs = (
        out.data.view(torch.uint8),
        out.scale,
        out.scale.stride(1),
        out.scale.stride(2),
        max_logits,
        lse,
    )
    if _fits_sm90(args, live, target):
        _launch_prefill_sm90(args, outputs, live)
        return [out.data, out.scale, max_logits, lse]
    tile = prefill_tile(live, target)
    prefill_kernel[(s_q, triton.cdiv(live, tile.heads))](
        q,
        q.stride(0),
        kv,
        kv.stride(0),
        kv.shape[0],
        indices,
        indices.stride(0),
        args.topk_length,
        indices.shape[-1],
        1,
        args.attn_sink,
        args.token_positions,
        args.cos_sin_cache,
        args.sm_scale * LOG2_E,
        args.q_norm_eps or 0.0,
        *outputs,
        HEADS=heads,
        H=tile.heads,
        N=tile.rows,
        HAS_LEN=args.topk_length is not None,
        HAS_SINK=args.attn_sink is not None,
        Q_NORM=args.q_norm_eps is not None,
        EMULATE=target.emulate,
        FP8_CVT=target.fp8_cvt,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return [out.data, out.scale, max_logits, lse]


def _launch_prefill_sm90(args: PrefillArguments, outputs: tuple[object, ...], live: int) -> None:
    from megabench.backends.triton import prefill_sm90 as sm90

    q, kv, indices = args.q, args.kv, args.indices
    sm90.prefill_sm90_kernel[(q.shape[0], triton.cdiv(live, sm90.HEADS_PER_PROGRAM))](
        q,
        q.stride(0),
        kv,
        kv.stride(0),
        kv.shape[0],
        indices,
        indices.stride(0),
        args.topk_length,
        indices.shape[-1],
        args.attn_sink,
        args.token_positions,
        args.cos_sin_cache,
        args.sm_scale * LOG2_E,
        *outputs,
        HEADS=q.shape[1],
        HAS_LEN=args.topk_length is not None,
        HAS_SINK=args.attn_sink is not None,
        num_warps=sm90.WARPS,
        maxnreg=sm90.REGISTERS_AT_LAUNCH,
    )
