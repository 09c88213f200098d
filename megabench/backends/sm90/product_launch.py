"""Launches the products that read the e4m3 weight: tiles, parameter blocks, grids, clusters."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from megabench.backends.sm90.kernel import SHARED_BYTES, Kernel, kernel

STAGE_COLUMNS = 128
ROWS = 128
"""Weight rows are a multiple of this."""
WIDEST = 128
"""Most tokens of a tile."""
SPLITS = (8, 4, 2)
NARROW_TOKENS = 16
"""Fewest tokens of a tile; it then has 64 rows, so that there are enough without a cluster."""


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
    """`Params` of product.cuh, whose first fields are those of `Operands`."""

    _fields_ = (
        ("o", Operands),
        ("row_tiles", ctypes.c_int32),
        ("token_tiles", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
        ("split", ctypes.c_int32),
    )


class Tile(NamedTuple):
    """What the kernel is compiled for: tokens (16 to 128) and weight rows (64 or 128) of a tile."""

    tokens: int
    rows: int

    @property
    def threads(self) -> int:
        """A CTA's threads: kThreads of product.cuh."""
        return 640 if self.tokens == WIDEST else 768


def tile_for(tokens: int) -> Tile:
    """The tile for `tokens` tokens."""
    width = min(WIDEST, max(NARROW_TOKENS, 1 << (tokens - 1).bit_length()))
    return Tile(width, ROWS // 2 if width == NARROW_TOKENS else ROWS)


def split_for(tiles: int, words: int, at_once: dict[int, int]) -> int:
    """CTAs that share a tile's columns: the most with room for every tile, given the clusters of
    each size that run at once, and a stage for each."""
    return next((n for n in SPLITS if n <= words and tiles <= at_once[n]), 1)


def operands(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
) -> Operands:
    """Pointers and strides of out bf16 [b, h, d] = x e4m3 [b, h, r] times w e4m3 [h, d, r], with
    int32 scale words [b, h, r/128] and [h, d, r/128]."""
    return Operands(
        x.data_ptr(),
        w.data_ptr(),
        x_scale.data_ptr(),
        w_scale.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        x.stride(1),
        w.stride(1),
        w.stride(0),
        x_scale.stride(0),
        x_scale.stride(1),
        x_scale.stride(2),
        w_scale.stride(1),
        w_scale.stride(0),
        w_scale.stride(2),
        out.stride(0),
        out.stride(1),
        x.shape[0],
        x.shape[2] // STAGE_COLUMNS,
    )


def product_kernel(device_index: int, tile: Tile) -> Kernel:
    """The kernel of a tile."""
    defines = (f"TOKENS={tile.tokens}", f"ROWS={tile.rows}")
    return kernel(device_index, "product.cu", "sm90_product", SHARED_BYTES, defines)


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> None:
    """Run on torch's current stream, for one token or more; `tile` other than the chosen one for
    measurements."""
    (tokens, groups, _), rows, index = x.shape, w.shape[1], out.device.index or 0
    o = operands(x, x_scale, w, w_scale, out)
    tile = tile or tile_for(tokens)
    row_tiles, token_tiles = rows // tile.rows, -(-tokens // tile.tokens)
    tiles = row_tiles * token_tiles * groups
    made = product_kernel(index, tile)
    at_once = {n: made.clusters_at_once(n, tile.threads) for n in SPLITS}
    split = split_for(tiles, o.words, at_once)
    params = Params(o, row_tiles, token_tiles, tiles, split)
    made.launch(params, (tiles * split, 1), tile.threads, split)
