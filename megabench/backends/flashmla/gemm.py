"""DeepGEMM: the grouped einsum and the MXFP8 linears, with packed ue8m0 scales.

Taken from the installed `deep_gemm`, else from the copy vLLM ships, as vLLM itself does. DeepGEMM
compiles its kernels at run time, so a machine without nvcc can import it and still not run it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megabench.backends.flashmla.binding import (
    LibraryAbsentError,
    LibraryUnfitError,
    build,
    first_line,
    package_folder,
    release,
)
from megabench.formats import round_up
from megabench.quant import UE8M0_BIAS, pack_mn_major

WORD_SCALES = 4
"""ue8m0 bytes in one int32 word."""
INSTALL = "pip install --no-deps 'sgl-deep-gemm>=0.2.5', or vllm >= 0.33, which bundles it"


@dataclass(frozen=True)
class GemmLibrary:
    """DeepGEMM's two functions we call."""

    name: str
    version: str
    fp8_einsum: Callable[..., Any]
    """(equation, (x, sx), (w, sw), out, recipe=)"""
    fp8_gemm_nt: Callable[..., Any]
    """((x, sx), (w, sw), out, recipe=): out [T, N] = x [T, K] . w [N, K]"""

    @classmethod
    def missing(cls, reason: str) -> GemmLibrary:
        """A stand-in for no library: both functions raise RuntimeError with `reason`."""

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError(reason)

        return cls("none", "", refuse, refuse)


@dataclass(frozen=True)
class GemmSearch:
    """What was found, and one sentence for each place passed over."""

    library: GemmLibrary | None
    refused: list[str]

    @property
    def reason(self) -> str:
        """Every sentence in one."""
        return "; ".join(self.refused)


def find_gemm() -> GemmSearch:
    """The first usable DeepGEMM; never raises."""
    refused: list[str] = []
    for module_name, distribution in (
        ("deep_gemm", "sgl-deep-gemm"),
        ("vllm.third_party.deep_gemm", "vllm"),
    ):
        try:
            return GemmSearch(_from(module_name, distribution), refused)
        except (LibraryAbsentError, LibraryUnfitError) as error:
            refused.append(str(error))
    return GemmSearch(None, refused)


def _from(module_name: str, distribution: str) -> GemmLibrary:
    module = _import(module_name, distribution)
    version = _version(module, distribution)
    functions = []
    for name in ("fp8_einsum", "fp8_gemm_nt"):
        function = getattr(module, name, None)
        if function is None:
            raise LibraryUnfitError(f"{module_name} {version} has no {name}; {INSTALL}")
        functions.append(function)
    return GemmLibrary(module_name, version, *functions)


def _import(module_name: str, distribution: str) -> ModuleType:
    top = module_name.partition(".")[0]
    if package_folder(top) is None:
        hint = f"; {INSTALL}" if top == module_name else ""
        raise LibraryAbsentError(f"{top} is not installed{hint}")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = f"no module {error.name}"
        raise LibraryAbsentError(
            f"{module_name} ({distribution} {release(distribution)}) does not import ({missing})"
        ) from error
    # A .so not loading, no CUDA home (AssertionError), missing files, ...
    except (Exception, SystemExit) as error:
        raise LibraryAbsentError(
            f"{module_name} ({distribution} {release(distribution)}) does not import "
            f"({type(error).__name__}: {first_line(error)}); its library is built for one torch, "
            "and it looks for a CUDA toolkit: set CUDA_HOME"
        ) from error


def _version(module: ModuleType, distribution: str) -> str:
    number = getattr(module, "__version__", None) or release(distribution)
    libraries = sorted(Path(module.__file__ or "").parent.glob("_C*.so"))
    return f"{number} ({build(libraries[0])})" if libraries else str(number)


def compiler() -> str | None:
    """What DeepGEMM would compile with: the path of an nvcc, or NVRTC where that is asked for."""
    if os.environ.get("DG_JIT_USE_NVRTC") == "1":
        return "NVRTC (DG_JIT_USE_NVRTC=1)"
    named = (os.environ.get(name) for name in ("DG_JIT_NVCC_COMPILER", "JIT_NVCC_COMPILER"))
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    candidates = [name for name in named if name]
    candidates += [f"{home}/bin/nvcc" for home in homes if home]
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def compiler_problem() -> str | None:
    """Why DeepGEMM could not compile a kernel here, or None when a compiler is in sight."""
    if compiler():
        return None
    return (
        "deep_gemm compiles its kernels when they are first called, and there is no nvcc: install "
        "the CUDA toolkit (12.9 or later) and set CUDA_HOME (DG_JIT_USE_NVRTC=1 where the build "
        "has NVRTC)"
    )


def pack_rows(scale: torch.Tensor) -> torch.Tensor:
    """ue8m0 bytes uint8 [rows, chunks] to int32 words [rows, ceil(chunks / 4)], MN-major.

    A last word's spare bytes are 127 (a factor of one): DeepGEMM multiplies them with zeros.
    """
    rows, chunks = scale.shape
    width = round_up(chunks, WORD_SCALES)
    if width != chunks:
        padded = scale.new_full((rows, width), UE8M0_BIAS)
        padded[:, :chunks] = scale
        scale = padded
    return pack_mn_major(scale.unsqueeze(0)).squeeze(0)


class PackedScales:
    """Packed scales of linear weights by the identity of the weight; an entry dies with it.

    A weight written to after `prepare` is packed afresh: never stale, only slow.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, int, torch.Tensor]] = {}

    def prepare(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Pack and keep the scale bytes uint8 [N, K/32] of e4m3 `weight` [N, K]."""
        key, made = id(weight), self._made
        reference = weakref.ref(weight, lambda _: made.pop(key, None))
        made[key] = (reference, scale._version, scale.data_ptr(), pack_rows(scale))

    def get(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The packed words, kept or made now."""
        kept = self._made.get(id(weight))
        if kept is not None:
            reference, version, address, packed = kept
            same = version == scale._version and address == scale.data_ptr()
            if same and reference() is weight:
                return packed
        return pack_rows(scale)
