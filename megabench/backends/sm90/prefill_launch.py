"""Launches the prefill kernel: the calls it serves, its parameter block and its grid."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from megabench.backends.arguments import PrefillArguments
from megabench.backends.sm90.nvrtc import bindings, check, load_function

ENTRY, KERNEL = "prefill.cu", "sm90_mega_prefill"
THREADS = 512
SHARED_BYTES = 232_448
"""Dynamic shared memory of a CTA: all that an SM gives one; prefill_layout.cuh asserts the fit."""
HEAD_TILE = 64
_LOG2E = 1.4426950408889634


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


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
        _pointer(topk_length),
        token_positions.data_ptr(),
        cos_sin_cache.data_ptr(),
        _pointer(attn_sink),
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
        sm_scale * _LOG2E,
    )


class PrefillKernel:
    """The loaded kernel of one device."""

    def __init__(self, device: torch.device, defines: tuple[str, ...] = ()) -> None:
        self._driver, _ = bindings()
        self._device = device
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes torch's context current
            self._function = load_function(ENTRY, KERNEL, SHARED_BYTES, defines)
            self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._configs: dict[int, Any] = {}

    def _config(self, ctas: int) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
        config.sharedMemBytes = SHARED_BYTES
        return config

    def launch(self, params: PrefillParams) -> None:
        """Run on torch's current stream, persistent over items: one CTA a multiprocessor."""
        ctas = min(params.items, self._sms)
        config = self._configs.get(ctas)
        if config is None:
            config = self._configs[ctas] = self._config(ctas)
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        argument = ctypes.c_void_p(ctypes.addressof(params))
        check(
            self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(argument), 0),
            "the launch of the prefill kernel",
        )


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
    prefill_kernel(args.q.device.index or 0).launch(params)
    return [out.data, out.scale, max_logits, lse]


@cache
def prefill_kernel(device_index: int, defines: tuple[str, ...] = ()) -> PrefillKernel:
    """The kernel of one device, compiled and loaded on first use."""
    return PrefillKernel(torch.device("cuda", device_index), defines)
