"""Launches the prefill kernel: the calls it serves, its parameter block and its grid."""

from __future__ import annotations

import ctypes

import torch

from megabench.backends.arguments import PrefillArguments
from megabench.backends.sm90.kernel import LOG2E, SHARED_BYTES, kernel, pointer

ENTRY, KERNEL = "prefill.cu", "sm90_mega_prefill"
THREADS = 512
HEAD_TILE = 64


class PrefillParams(ctypes.Structure):
    """`Params` of prefill_layout.cuh, field for field."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("max_logits", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("index_stride", ctypes.c_int64),
        ("scale_word", ctypes.c_int64),
        ("scale_group", ctypes.c_int64),
        ("s_kv", ctypes.c_int32),
        ("topk", ctypes.c_int32),
        ("items", ctypes.c_int32),
        ("head_tiles", ctypes.c_int32),
        ("sm_scale", ctypes.c_float),
        ("scale_log2", ctypes.c_float),
    )


def prefill_params(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    token_positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    out_fp8: torch.Tensor,
    out_sf: torch.Tensor,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
) -> PrefillParams:
    """The parameter block of one call that the kernel serves."""
    head_tiles = q.shape[1] // HEAD_TILE
    return PrefillParams(
        q.data_ptr(),
        kv.data_ptr(),
        indices.data_ptr(),
        pointer(topk_length),
        token_positions.data_ptr(),
        cos_sin_cache.data_ptr(),
        pointer(attn_sink),
        out_fp8.data_ptr(),
        out_sf.data_ptr(),
        max_logits.data_ptr(),
        lse.data_ptr(),
        q.stride(0),
        indices.stride(0),
        out_sf.stride(2),
        out_sf.stride(1),
        kv.shape[0],
        indices.shape[-1],
        q.shape[0] * head_tiles,
        head_tiles,
        sm_scale,
        sm_scale * LOG2E,
    )


def launch(params: PrefillParams, device_index: int, defines: tuple[str, ...] = ()) -> None:
    """Run on torch's current stream, persistent over items: one CTA a multiprocessor."""
    loaded = kernel(device_index, ENTRY, KERNEL, SHARED_BYTES, defines)
    loaded.launch(params, (min(params.items, loaded.multiprocessors), 1), THREADS)


def serves(args: PrefillArguments) -> bool:
    """Whether the kernel can read the arguments of a call that passed its checks.

    It has no Q norm and needs a positive scale. It computes 64 heads however few are live, which
    is faster than Triton's smaller tiles at every number measured (docs/kernels.md).
    """
    q = args.q
    vectors = (args.indices, args.attn_sink, args.topk_length)
    return (
        not args.enable_q_norm
        and args.sm_scale > 0
        and q.shape[0] > 0
        and args.kv.shape[0] > 0
        and all(x.data_ptr() % 16 == 0 for x in (q, args.kv, args.cos_sin_cache))
        and q.stride(0) % 8 == 0
        and (args.out_fp8 is None or args.out_fp8.data_ptr() % 8 == 0)
        and all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in vectors if x is not None)
    )


def prefill(args: PrefillArguments) -> list[torch.Tensor]:
    """[out_fp8, out_sf, max_logits, lse] of a call that the kernel serves."""
    out, max_logits, lse = args.output(), args.empty_lse(), args.empty_lse()
    params = prefill_params(
        args.q,
        args.kv,
        args.indices,
        args.sm_scale,
        args.attn_sink,
        args.topk_length,
        args.token_positions,
        args.cos_sin_cache,
        out.data,
        out.scale,
        max_logits,
        lse,
    )
    launch(params, args.q.device.index or 0)
    return [out.data, out.scale, max_logits, lse]
