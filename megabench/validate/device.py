"""Errors that a launch leaves behind in the CUDA runtime when nobody asks for them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor


class LaunchError(RuntimeError):
    """A kernel that was never launched; names the op and the runtime's reason."""


@lru_cache
def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded: its last error is the one that torch sees."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    paths = [line.split(maxsplit=5)[5] for line in lines if "/libcudart" in line]
    if not paths:
        return None
    library = ctypes.CDLL(paths[0])
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def taken_error() -> str | None:
    """The runtime's last error, cleared unless it is a sticky one; None when there is none."""
    library = _runtime()
    code = library.cudaGetLastError() if library is not None else 0
    return library.cudaGetErrorString(code).decode() if library is not None and code else None


def check_launch(op: str, args: Mapping[str, Any]) -> None:
    """LaunchError when `op`, called with `args`, left an error behind on a GPU."""
    problem = taken_error() if _on_a_gpu(args) else None
    if problem is not None:
        raise LaunchError(f"{op} left a CUDA error behind: {problem}")


def _on_a_gpu(args: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and value.is_cuda for value in args.values())
