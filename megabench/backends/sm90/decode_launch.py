"""Launches the decode kernel: its parameter block, its grid and its cluster size."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

from megabench.backends.sm90.kernel import LOG2E, SHARED_BYTES, Kernel, kernel, pointer

ENTRY, KERNEL = "decode.cu", "sm90_mega_decode"
THREADS = 512
HEAD_TILE = 64
BLOCK_ROWS = 64
CLUSTER_SIZES = (10, 8, 6, 5, 4, 3, 2)
"""CTAs that may share an item; more than 8 need a launch attribute and a GPU with room. Seven would
not fit their partial outputs in shared memory."""
REPLICAS = (8, 4, 2, 1)
"""Clusters that may compute one item, each finishing a part of its output."""
_Pair32, _PairPtr = ctypes.c_uint32 * 2, ctypes.c_void_p * 2


class Params(ctypes.Structure):
    """`Params` of layout.cuh, field for field."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("pool", _PairPtr),
        ("indices", _PairPtr),
        ("lengths", _PairPtr),
        ("positions", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("scale_word", ctypes.c_int64),
        ("scale_group", ctypes.c_int64),
        ("page", _Pair32),
        ("page_magic", _Pair32),
        ("page_shift", _Pair32),
        ("page_stride", _Pair32),
        ("slots", _Pair32),
        ("topk", ctypes.c_int32 * 2),
        ("index_stride", ctypes.c_int32 * 2),
        ("items", ctypes.c_int32),
        ("head_tiles", ctypes.c_int32),
        ("split", ctypes.c_int32),
        ("replicas", ctypes.c_int32),
        ("scale_log2", ctypes.c_float),
    )


class Shape(NamedTuple):
    """How an item is spread: CTAs of a cluster, and clusters that all compute it."""

    split: int = 1
    replicas: int = 1


def shape_for(items: int, blocks: int, room: Mapping[int, int]) -> Shape:
    """The fastest way to spread items of `blocks` blocks; room: clusters that run at once, by size.

    The estimate, in units of 1.2 us, is a fit to all shapes at 1 to 40 tokens on an H200: 2 for
    each block of a CTA, 5 for moving and adding up the partial outputs of 64 heads.
    """

    def cost(shape: Shape) -> float:
        split, replicas = shape
        return 2 * -(-blocks // split) + 5 * (split - 1) / (split * replicas)

    fitting = [
        Shape(split, replicas)
        for split in CLUSTER_SIZES
        for replicas in REPLICAS
        if split <= blocks and items * replicas <= room[split]
    ]
    return min(fitting, key=cost, default=Shape())


class DecodeKernel:
    """The loaded kernels of one device, built for one record type of the extra cache: for clusters
    that share an item each, and for CTAs that are persistent over items."""

    def __init__(self, clustered: Kernel, persistent: Kernel) -> None:
        clustered.allow_large_clusters()
        self._clustered, self._persistent = clustered, persistent
        self.clusters = {size: clustered.clusters_at_once(size, THREADS) for size in CLUSTER_SIZES}

    def shape_for(self, items: int, blocks: int) -> Shape:
        """How to spread items of at most `blocks` blocks over this device."""
        return shape_for(items, blocks, self.clusters)

    def launch(self, params: Params, shape: Shape) -> None:
        """Run on torch's current stream."""
        split, replicas = params.split, params.replicas = shape
        if split > 1:  # a cluster is a row of the grid
            self._clustered.launch(params, (split, params.items * replicas), THREADS, split)
        else:
            ctas = min(params.items, self._persistent.multiprocessors)
            self._persistent.launch(params, (ctas, 1), THREADS)


@cache
def decode_kernel(
    device_index: int, extra_fp4: bool, defines: tuple[str, ...] = ()
) -> DecodeKernel:
    """The kernels of one device, compiled and loaded on first use."""

    def load(clustered: bool) -> Kernel:
        build = (f"EXTRA_FP4={int(extra_fp4)}", f"CLUSTERED={int(clustered)}", *defines)
        return kernel(device_index, ENTRY, KERNEL, SHARED_BYTES, build)

    return DecodeKernel(load(True), load(False))


@cache
def divisor(number: int) -> tuple[int, int]:
    """(magic, shift) with n // number == n * magic >> shift for 0 <= n < 2^31, magic < 2^32."""
    shift = 31 + (number - 1).bit_length()
    return (1 << shift) // number + 1, shift


class Source(NamedTuple):
    """One cache and its index list, as the kernel addresses them; an absent one has no columns."""

    pool: int | None = None
    indices: int | None = None
    lengths: int | None = None
    page: int = 0
    page_magic: int = 0
    page_shift: int = 0
    page_stride: int = 0
    slots: int = 0
    topk: int = 0
    index_stride: int = 0


def _source(
    pool: torch.Tensor | None, indices: torch.Tensor | None, lengths: torch.Tensor | None
) -> Source:
    if pool is None or indices is None:
        return Source()
    blocks, page, stride = pool.shape[0], pool.shape[1], pool.stride(0)
    if blocks == 1:
        stride = page * pool.shape[-1]
    columns, index_stride = indices.shape[1], indices.stride(0)
    return Source(
        pool.data_ptr(),
        indices.data_ptr(),
        pointer(lengths),
        page,
        *divisor(page),
        stride // 16,
        blocks * page,
        columns,
        index_stride,
    )


def decode_params(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    extra_kv: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    token_positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    out_fp8: torch.Tensor,
    out_sf: torch.Tensor,
    lse: torch.Tensor,
) -> Params:
    """The parameter block of one call that the kernel serves. Its shape is set at the launch."""
    swa = _source(kv, indices, topk_length)
    extra = _source(extra_kv, extra_indices, extra_topk_length)
    head_tiles = q.shape[1] // HEAD_TILE
    return Params(
        q.data_ptr(),
        (swa.pool, extra.pool),
        (swa.indices, extra.indices),
        (swa.lengths, extra.lengths),
        token_positions.data_ptr(),
        cos_sin_cache.data_ptr(),
        pointer(attn_sink),
        out_fp8.data_ptr(),
        out_sf.data_ptr(),
        lse.data_ptr(),
        q.stride(0),
        out_sf.stride(2),
        out_sf.stride(1),
        (swa.page, extra.page),
        (swa.page_magic, extra.page_magic),
        (swa.page_shift, extra.page_shift),
        (swa.page_stride, extra.page_stride),
        (swa.slots, extra.slots),
        (swa.topk, extra.topk),
        (swa.index_stride, extra.index_stride),
        q.shape[0] * head_tiles,
        head_tiles,
        *Shape(),
        sm_scale * LOG2E,
    )


def blocks_of(params: Params) -> int:
    """Most blocks an item can have."""
    return sum(-(-int(topk) // BLOCK_ROWS) for topk in params.topk)
