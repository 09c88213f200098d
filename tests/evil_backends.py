"""A backend that ends badly, each time in another way: the step's token count says which."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from megabench.backends import TorchBackend


def _flood() -> None:
    line = "x" * 4095 + "\n"
    for _ in range(25 << 10):  # 100 MiB
        sys.stdout.write(line)


def _refuse_to_end() -> None:
    print("spinning")
    while True:
        time.sleep(0.01)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _want_memory() -> None:
    raise MemoryError("all of it")


def _crash() -> None:
    print("about to crash", file=sys.stderr)
    ctypes.string_at(0)


def _into_pipes(line: bytes) -> None:
    """Write to whatever is open, the pipe of the worker's rows among it."""
    for descriptor in range(3, 32):
        with suppress(OSError):
            os.write(descriptor, line)


def _mumble() -> None:
    raise RuntimeError("\udcff\x1b[31m" + "word " * 100_000)


EVILS: dict[int, Callable[[], None]] = {
    2: lambda: os._exit(0),
    3: _crash,
    4: _refuse_to_end,
    5: _flood,
    6: _want_memory,
    7: lambda: sys.exit("enough"),
    8: _interrupt,
    10: lambda: _into_pipes(b"{no row\n"),
    11: lambda: _into_pipes(b'{"kind":"done"}\n'),
    12: lambda: os.chdir("/"),
    13: _mumble,
}
"""By tokens of the step; a step of any other size is served as it should be."""


class Evil(TorchBackend):
    """Right on steps of one token."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        EVILS.get(len(x), lambda: None)()
        return super().linear(x, w, sw)


class Slow(TorchBackend):
    """Right, but slow, and in a step of three tokens held while the file `hold` is there."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        while len(x) == 3 and Path("hold").exists():
            time.sleep(0.05)
        return super().linear(x, w, sw)


class Wrong(TorchBackend):
    """The sign of a linear turned round."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        return -super().linear(x, w, sw)
