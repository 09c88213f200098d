"""Launches the products that read the e4m3 weight: tiles, parameter blocks, grids, clusters."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from megabench.backends.sm90.kernel import SHARED_BYTES, Kernel, kernel
from megabench.backends.sm90.operands import STAGE_COLUMNS, operands
from megabench.backends.sm90.tensor_map import TensorMap, box_map

ROWS = 128
"""Weight rows of a tile, and a multiple that a weight must have."""
BOX_ROWS = 32
"""Weight rows of a tensor copy."""
WIDTHS = (16, 32, 64, 128)
"""Tokens of a tile."""
SPLITS = (8, 4, 2)
USUAL_SPLIT = 2
"""Of a layer's eight groups and few tokens."""


class Operands(ctypes.Structure):
    """`Operands` of mxfp8.cuh, field for field."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("w_scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_token", ctypes.c_int64),
        ("x_group", ctypes.c_int64),
        ("w_row", ctypes.c_int64),
        ("w_group", ctypes.c_int64),
        ("x_scale_token", ctypes.c_int64),
        ("x_scale_group", ctypes.c_int64),
        ("x_scale_word", ctypes.c_int64),
        ("w_scale_row", ctypes.c_int64),
        ("w_scale_group", ctypes.c_int64),
        ("w_scale_word", ctypes.c_int64),
        ("out_token", ctypes.c_int64),
        ("out_group", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("words", ctypes.c_int32),
    )


class Params(ctypes.Structure):
    """`Params` of product.cuh, field for field."""

    _fields_ = (
        ("x_map", TensorMap),
        ("w_map", TensorMap),
        ("o", Operands),
        ("token_tiles", ctypes.c_int32),
        ("share", ctypes.c_int32),
        ("unused", ctypes.c_int32 * 10),
    )


class Build(NamedTuple):
    """What the kernel is compiled for: a tile's tokens, and the CTAs that share its columns."""

    width: int
    split: int

    @property
    def threads(self) -> int:
        """A CTA's threads: kThreads of product.cuh."""
        return 512 if self.width < WIDTHS[-1] else 640

    @property
    def defines(self) -> tuple[str, ...]:
        return f"TOKENS={self.width}", f"SPLIT={self.split}"


def width_for(tokens: int) -> int:
    """The tile for `tokens` tokens: all of them, if any has as many."""
    return next((width for width in WIDTHS if tokens <= width), WIDTHS[-1])


def tiles_of(tokens: int, groups: int, rows: int, width: int | None = None) -> int:
    """Tiles of an output [tokens, groups, rows]."""
    return -(-tokens // (width or width_for(tokens))) * groups * (rows // ROWS)


def split_for(tiles: int, words: int, at_once: dict[int, int]) -> int:
    """CTAs that share a tile's columns: the most with room for every tile, given the clusters of
    each size that run at once, and a stage for each."""
    return next((n for n in SPLITS if n <= words and tiles <= at_once[n]), 1)


def product_kernel(device_index: int, build: Build) -> Kernel:
    """The kernel of a build."""
    return kernel(device_index, "product.cu", "sm90_product", SHARED_BYTES, build.defines)


def build_for(device_index: int, width: int, tiles: int, words: int) -> Build:
    """The build that serves `tiles` tiles. Room for clusters is the same with any split."""
    usual = Build(width, USUAL_SPLIT)
    count = product_kernel(device_index, usual).clusters_at_once
    return Build(width, split_for(tiles, words, {n: count(n, usual.threads) for n in SPLITS}))


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    width: int | None = None,
) -> None:
    """Run on torch's current stream, for one token or more; `width` other than the chosen one for
    measurements."""
    (tokens, groups, _), index = x.shape, out.device.index or 0
    width = width or width_for(tokens)
    o = Operands(*operands(x, x_scale, w, w_scale, out))
    row_tiles, token_tiles = w.shape[1] // ROWS, -(-tokens // width)
    build = build_for(index, width, tiles_of(tokens, groups, w.shape[1], width), o.words)
    params = Params(
        box_map(x, (width, 1, STAGE_COLUMNS)),
        box_map(w, (1, BOX_ROWS, STAGE_COLUMNS)),
        o,
        token_tiles,
        -(-o.words // build.split),
    )
    grid = (row_tiles * build.split, token_tiles * groups)
    product_kernel(index, build).launch(params, grid, build.threads, build.split)
