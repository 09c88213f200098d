"""Putting stand-ins in place for one test, and taking them out again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import flashmla_c

PACKAGES = Path(__file__).parent / "packages"
NAMES = ("flash_mla", "deep_gemm", "vllm")


def _forget(name: str) -> None:
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[module]


@contextmanager
def on_path(*folders: Path) -> Iterator[None]:
    """Import flash_mla, deep_gemm and vllm from `folders` only, while inside."""
    before, sys.path[:0] = list(sys.path), [str(folder) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = before
        wheel = sys.modules.get("flash_mla")
        if hasattr(wheel, "_library"):
            wheel._library._destroy()
        for name in NAMES:
            _forget(name)


@contextmanager
def vllm_ops(**changes: object) -> Iterator[None]:
    """vLLM's op library loaded in this process, as `flashmla_c.register` changes it."""
    library = flashmla_c.register(**changes)  # type: ignore[arg-type]
    try:
        yield
    finally:
        library._destroy()
