"""Launches the product for a handful of tokens."""

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
SUMS_BYTES = 65_536
"""Shared memory of a CTA: the sums of its tiles' pieces."""
OFFSETS = 1 << 32
"""The kernel's offsets have 32 bits."""


class Params(ctypes.Structure):
    """`Params` of skinny.cuh, field for field."""

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
    (tokens, groups, columns), row_tiles = x.shape, w.shape[1] // ROWS
    room = next(room for room in TOKENS if tokens <= room)
    made = skinny_kernel(out.device.index or 0, room)
    pieces = pieces_of(columns)
    wide = min(pieces, WARPS)
    most = min(row_tiles, SUMS_BYTES // (pieces * sums_bytes(room)))
    each = tiles_each(row_tiles, groups, most, made.multiprocessors)
    params = Params(
        *operands(x, x_scale, w, w_scale, out),
        row_tiles,
        each,
        pieces,
        wide,
        WARPS // wide,
    )
    made.launch(params, (-(-row_tiles // each), groups), THREADS)
