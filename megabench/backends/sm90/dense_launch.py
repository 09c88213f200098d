"""Launches the product with a bf16 weight, and lays that weight out in operand pieces."""

from __future__ import annotations

import ctypes

import torch

from megabench.backends.sm90.kernel import SHARED_BYTES, kernel
from megabench.backends.sm90.operands import STAGE_COLUMNS
from megabench.backends.sm90.tensor_map import TensorMap, box_map

SOURCE, NAME = "dense.cu", "sm90_dense_product"
THREADS = 384
TILE_TOKENS = 128
PIECE_ROWS, PIECE_COLUMNS = 256, 64


class Params(ctypes.Structure):
    """`Params` of dense.cuh, field for field."""

    _fields_ = (
        ("x", TensorMap),
        ("w", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_scale_token", ctypes.c_int64),
        ("x_scale_group", ctypes.c_int64),
        ("x_scale_word", ctypes.c_int64),
        ("out_token", ctypes.c_int64),
        ("out_group", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("words", ctypes.c_int32),
        ("row_tiles", ctypes.c_int32),
        ("token_tiles", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
        ("unused", ctypes.c_int32 * 11),
    )


def operand_pieces(dense: torch.Tensor) -> torch.Tensor:
    """bf16 [G, D/256, K/64, 256, 64] of a weight bf16 [G, D, K]: pieces of 128-byte rows in wgmma's
    128-byte swizzle.

    Rows: row 8i + 2c + e of 32 is the weight's 8c + 2i + e, so that a lane's results are
    neighbours. Columns: 8h + 2s + e of 16 is the weight's 4s + h + 2e, the order of fragments.
    """
    groups, rows, _ = dense.shape
    n, place = torch.arange(PIECE_ROWS), torch.arange(PIECE_COLUMNS)
    row = n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2
    column = ((place // 8)[None] ^ (n % 8)[:, None]) * 8 + place % 8
    column = column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 + column % 2 * 2
    pieces = dense.view(groups, rows // PIECE_ROWS, PIECE_ROWS, -1, PIECE_COLUMNS).transpose(2, 3)
    return pieces[..., row[:, None].to(dense.device), column.to(dense.device)].contiguous()


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    pieces: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out bf16 [b, h, d] = x e4m3 [b, h, r], int32 scale words [b, h, r/128], times a weight's
    pieces, on torch's current stream."""
    (tokens, groups, columns), row_tiles = x.shape, pieces.shape[1]
    token_tiles = -(-tokens // TILE_TOKENS)
    tiles = row_tiles * token_tiles * groups
    params = Params(
        box_map(x, (TILE_TOKENS, 1, STAGE_COLUMNS)),
        pieces.data_ptr(),
        x_scale.data_ptr(),
        out.data_ptr(),
        x_scale.stride(0),
        x_scale.stride(1),
        x_scale.stride(2),
        out.stride(0),
        out.stride(1),
        tokens,
        columns // STAGE_COLUMNS,
        row_tiles,
        token_tiles,
        tiles,
    )
    made = kernel(out.device.index or 0, SOURCE, NAME, SHARED_BYTES)
    made.launch(params, (min(tiles, made.multiprocessors), 1), THREADS)
