"""Launches the products for a handful of tokens: single.cu for one, where its loads fit the shape,
else skinny.cu."""

from __future__ import annotations

import ctypes

import torch

from megabench.backends.sm90.kernel import Kernel, kernel
from megabench.backends.sm90.operands import STAGE_COLUMNS, operands

SOURCE, NAME = "skinny.cu", "sm90_skinny_product"
TOKENS = (2, 4, 8)
"""Most tokens of each build."""
ROWS, THREADS, WARPS = 16, 512, 16
PIECE_WORDS = 2
SINGLE_SOURCE, SINGLE_NAME = "single.cu", "sm90_single_product"
SINGLE_ROWS = 8
SINGLE_TILES = (1, 2, 4, 8)
"""Tiles of a CTA, of each build. Eight have 64 rows: a weight has a multiple of 128."""
SINGLE_COLUMNS = WARPS * PIECE_WORDS * STAGE_COLUMNS
SUMS_BYTES = 65_536
"""Shared memory of a CTA: the sums of its tiles' pieces."""
OFFSETS = 1 << 32
"""The kernel's offsets have 32 bits."""


class Params(ctypes.Structure):
    """`Params` of skinny_math.cuh, field for field."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("w_scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_token", ctypes.c_uint32),
        ("x_group", ctypes.c_uint32),
        ("w_row", ctypes.c_uint32),
        ("w_group", ctypes.c_uint32),
        ("x_scale_token", ctypes.c_uint32),
        ("x_scale_group", ctypes.c_uint32),
        ("x_scale_word", ctypes.c_uint32),
        ("w_scale_row", ctypes.c_uint32),
        ("w_scale_group", ctypes.c_uint32),
        ("w_scale_word", ctypes.c_uint32),
        ("out_token", ctypes.c_uint32),
        ("out_group", ctypes.c_uint32),
        ("tokens", ctypes.c_int32),
        ("words", ctypes.c_int32),
        ("row_tiles", ctypes.c_int32),
        ("tiles_each", ctypes.c_int32),
        ("pieces", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("teams", ctypes.c_int32),
    )


def sums_bytes(room: int) -> int:
    """Of one tile's piece in the build for `room` tokens: kSum floats."""
    return 4 * (ROWS * room + 16)


def pieces_of(columns: int) -> int:
    """Pieces of a row."""
    return -(-columns // (STAGE_COLUMNS * PIECE_WORDS))


def serves(x: torch.Tensor, w: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernel takes activations [b, h, r] and a weight [h, d, r]: few tokens, a tile's
    sums fit, and no tensor reaches further than offsets do."""
    fits = pieces_of(x.shape[2]) * sums_bytes(TOKENS[-1]) <= SUMS_BYTES
    return x.shape[0] <= TOKENS[-1] and fits and all(_span(t) <= OFFSETS for t in (x, w, *others))


def _span(t: torch.Tensor) -> int:
    """Elements from a tensor's first to its last, both counted."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def tiles_each(row_tiles: int, groups: int, most: int, multiprocessors: int) -> int:
    """Tiles of a CTA: as few as one CTA for each multiprocessor allows, `most` at most."""
    each = 1
    while each < most and -(-row_tiles // each) * groups > multiprocessors:
        each += 1
    return each


def single_serves(x: torch.Tensor, w_scale: torch.Tensor) -> bool:
    """Whether single.cu takes the activations and scale words of a call: one token, rows of
    SINGLE_COLUMNS, and words of neighbouring rows side by side, four to an aligned load."""
    quads = all(step % 4 == 0 for step in (w_scale.stride(0), w_scale.stride(2)))
    aligned = quads and w_scale.stride(1) == 1 and w_scale.data_ptr() % 16 == 0
    return x.shape[0] == 1 and x.shape[2] == SINGLE_COLUMNS and aligned


def single_tiles(row_tiles: int, groups: int, multiprocessors: int) -> int:
    """Tiles of a CTA of single.cu: of its builds, the first that needs no more CTAs than there are
    multiprocessors, else the last."""
    fitting = (n for n in SINGLE_TILES if row_tiles // n * groups <= multiprocessors)
    return next(fitting, SINGLE_TILES[-1])


def single_kernel(device_index: int, tiles: int) -> Kernel:
    """The kernel for one token whose CTAs have `tiles` tiles."""
    return kernel(device_index, SINGLE_SOURCE, SINGLE_NAME, 0, (f"TILES={tiles}",))


def skinny_kernel(device_index: int, room: int) -> Kernel:
    """The kernel for up to `room` tokens."""
    return kernel(device_index, SOURCE, NAME, SUMS_BYTES, (f"TOKENS={room}",))


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out bf16 [b, h, d] = x e4m3 [b, h, r] times w e4m3 [h, d, r], with int32 scale words
    [b, h, r/128] and [h, d, r/128], on torch's current stream."""
    listed, index = operands(x, x_scale, w, w_scale, out), out.device.index or 0
    if single_serves(x, w_scale):
        _launch_single(index, w.shape, listed)
    else:
        _launch_skinny(index, w.shape, listed, x.shape[0])


def _launch_single(index: int, shape: torch.Size, listed: tuple[int, ...]) -> None:
    groups, row_tiles = shape[0], shape[1] // SINGLE_ROWS
    properties = torch.cuda.get_device_properties(index)
    tiles = single_tiles(row_tiles, groups, properties.multi_processor_count)
    params = Params(*listed, row_tiles, tiles, WARPS, WARPS, 1)
    single_kernel(index, tiles).launch(params, (row_tiles // tiles, groups), THREADS)


def _launch_skinny(index: int, shape: torch.Size, listed: tuple[int, ...], tokens: int) -> None:
    groups, row_tiles, pieces = shape[0], shape[1] // ROWS, pieces_of(shape[2])
    room = next(room for room in TOKENS if tokens <= room)
    made = skinny_kernel(index, room)
    wide = min(pieces, WARPS)
    most = min(row_tiles, SUMS_BYTES // (pieces * sums_bytes(room)))
    each = tiles_each(row_tiles, groups, most, made.multiprocessors)
    params = Params(*listed, row_tiles, each, pieces, wide, WARPS // wide)
    made.launch(params, (-(-row_tiles // each), groups), THREADS)
