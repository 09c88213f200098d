"""Launches the quantization of a linear's activations."""

from __future__ import annotations

import ctypes

import torch

from megabench.backends.sm90.kernel import kernel

SOURCE, NAME = "activation.cu", "sm90_quantize"
THREADS = 128
BLOCK_COLUMNS = 8 * THREADS
SCALE_COLUMNS = 128
"""Columns under one word of scales."""


class Params(ctypes.Structure):
    """`Params` of activation.cu, field for field."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("columns", ctypes.c_int32),
    )


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes e4m3 [T, K], scale words int32 [T, K/128]) of bf16 x [T, K], T > 0: per token and 32
    columns, as CONTRACT 5 has a linear's input. K is a multiple of 128; rows 16-byte aligned."""
    tokens, columns = x.shape
    codes = torch.empty((tokens, columns), dtype=torch.float8_e4m3fn, device=x.device)
    words = torch.empty((tokens, columns // SCALE_COLUMNS), dtype=torch.int32, device=x.device)
    params = Params(x.data_ptr(), codes.data_ptr(), words.data_ptr(), x.stride(0), columns)
    made = kernel(x.device.index or 0, SOURCE, NAME, 0)
    made.launch(params, (tokens, -(-columns // BLOCK_COLUMNS)), THREADS)
    return codes, words
