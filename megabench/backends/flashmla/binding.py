"""Finding the vendor's attention ops: vLLM's `torch.ops._flashmla_C`, else the `flash_mla` package.

Each place that is looked at and not taken leaves one sentence that says what is wrong and what to
do. Nothing here imports vLLM itself: its op library is loaded by path, which registers the ops and
nothing else.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megabench.backends.flashmla import ownership
from megabench.backends.flashmla.schemas import (
    DECODE,
    PERMUTE_Q_B,
    PERMUTE_WV,
    PREFILL,
    SCHEMAS,
    schema_problem,
)
from megabench.formats import PageLayout

VLLM_NAMESPACE = ownership.NAMESPACE
WHEEL_NAMESPACE = "flash_mla"
INSTALL = "pip install --no-deps 'sgl-flash-mla>=1.0', or vllm >= 0.33"
Op = Callable[..., Sequence[torch.Tensor]]


class LibraryAbsentError(RuntimeError):
    """A library that is not installed or does not load."""


class LibraryUnfitError(RuntimeError):
    """A library that loads and lacks an op, or has one we do not know."""


@dataclass(frozen=True)
class AttentionLibrary:
    """The vendor's four ops, called with the arguments and in the order of `SCHEMAS`."""

    name: str
    version: str
    """Release and build: "0.33.0 (_flashmla_C.abi3.so 1f2e3d4c5b6a)"."""
    in_place: bool
    """Whether decode and prefill take the two out tensors; if not, they allocate."""
    decode: Op
    prefill: Op
    permute_q_b_proj: Op
    permute_wv_proj: Op

    @classmethod
    def missing(cls, reason: str) -> AttentionLibrary:
        """A stand-in for no library: every op raises RuntimeError with `reason`."""

        def refuse(*_: Any) -> Sequence[torch.Tensor]:
            raise RuntimeError(reason)

        return cls("none", "", False, refuse, refuse, refuse, refuse)


@dataclass(frozen=True)
class Search:
    """What was found, and one sentence for each place passed over."""

    library: AttentionLibrary | None
    absent: list[str]
    unfit: list[str]

    @property
    def reason(self) -> str:
        """Every sentence in one: what does not fit before what is not there."""
        return "; ".join(self.unfit + self.absent)


def find_attention(page_layout: PageLayout) -> Search:
    """The first library, in the order above, whose ops are all there and known; never raises."""
    absent: list[str] = []
    unfit: list[str] = []
    for find in SOURCES.values():
        try:
            return Search(find(page_layout), absent, unfit)
        except LibraryAbsentError as error:
            absent.append(str(error))
        except LibraryUnfitError as error:
            unfit.append(str(error))
    return Search(None, absent, unfit)


# ---- vLLM's torch.ops._flashmla_C ------------------------------------------------


def load_vllm_ops() -> str:
    """Register vLLM's ops in this process, unless they are; returns release and build.

    LibraryAbsentError when vLLM is not installed, was built without them, or does not load.
    """
    library = vllm_library()
    if not ownership.vendor_defined():
        if library is None:
            raise LibraryAbsentError("vllm is not installed (no module vllm)")
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except Exception as error:  # OSError, RuntimeError: whatever dlopen and static init do
            raise LibraryAbsentError(
                f"vllm {release('vllm')}: {library.name} does not load "
                f"({first_line(error)}); "
                "install the build for this torch and CUDA"
            ) from error
    return release("vllm") if library is None else f"{release('vllm')} ({build(library)})"


def vllm_library() -> Path | None:
    """Path of an installed vLLM's `_flashmla_C`; LibraryAbsentError where vLLM lacks it."""
    folder = package_folder("vllm")
    if folder is None:
        return None
    libraries = sorted(folder.glob("_flashmla_C*.so"))
    if not libraries and not ownership.vendor_defined():
        raise LibraryAbsentError(
            f"vllm {release('vllm')} was built without _flashmla_C: nvcc too old, or no supported "
            "architecture among its build targets"
        )
    return libraries[0] if libraries else None


def _from_vllm(page_layout: PageLayout) -> AttentionLibrary:
    if ownership.ours():
        raise LibraryUnfitError(
            f"torch.ops.{VLLM_NAMESPACE} holds megabench's own kernels (register_flashmla_ops); "
            "undo() the registration first"
        )
    version = load_vllm_ops()
    if page_layout != "interleaved":
        raise LibraryUnfitError(f"vllm's {VLLM_NAMESPACE} reads interleaved pages only")
    ops = getattr(torch.ops, VLLM_NAMESPACE)
    if not hasattr(ops, DECODE):
        raise LibraryUnfitError(
            f"vllm {version}: {VLLM_NAMESPACE} was built without the mega attention ops; "
            "they came with 0.33"
        )
    if not hasattr(ops, PERMUTE_Q_B):
        raise LibraryUnfitError(
            f"vllm {version}: {VLLM_NAMESPACE} predates the mega attention weight permutes; "
            "upgrade to 0.33 or later"
        )
    for name in SCHEMAS:
        problem = schema_problem(VLLM_NAMESPACE, name, in_place=True)
        if problem:
            raise LibraryUnfitError(f"vllm {version}: {problem}")
    # The overload, not the packet: resolving it costs more than the rest of our call.
    decode, prefill, permute_q_b, permute_wv = (getattr(ops, name).default for name in SCHEMAS)
    return AttentionLibrary(
        f"vllm {VLLM_NAMESPACE}", version, True, decode, prefill, permute_q_b, permute_wv
    )


# ---- the flash_mla package ------------------------------------------------------

_NORM_ROPE_CAST = (
    "enable_q_norm",
    "rms_norm_eps",
    "token_positions",
    "is_rope_neox_style",
    "rope_dim",
    "cos_sin_cache",
    "n_wv_group",
    "num_per_channels",
    "use_tma_aligned_col_major_sf",
    "round_sf",
    "use_packed_ue8m0",
)
_WHEEL_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "decode": (
        *_NORM_ROPE_CAST,
        "q",
        "k_cache",
        "indices_in_kvcache",
        "sm_scale",
        "d_v",
        "attn_sink",
        "topk_length",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "extra_topk_length",
    ),
    "prefill": (
        *_NORM_ROPE_CAST,
        "q",
        "kv",
        "indices",
        "sm_scale",
        "d_v",
        "attn_sink",
        "topk_length",
    ),
    "permute_q_b_proj": ("weight_and_sf", "h_q", "d_q"),
    "permute_wv_proj": ("weight_and_sf", "wv_group_size", "d_o"),
}
"""Parameters of `flash_mla.fused_norm_rope_attn_rope_cast`, in order; more may follow."""


def _from_wheel(page_layout: PageLayout) -> AttentionLibrary:
    module = _import_wheel()
    version = wheel_version(module)
    fused = getattr(module, "fused_norm_rope_attn_rope_cast", None)
    if fused is None or not hasattr(fused, "decode"):
        raise LibraryUnfitError(
            f"flash_mla {version} has no fused_norm_rope_attn_rope_cast: too old, or the empty "
            f"PyPI package of that name; {INSTALL}"
        )
    if not hasattr(fused, "permute_q_b_proj"):
        raise LibraryUnfitError(f"flash_mla {version} predates the weight permutes; {INSTALL}")
    _check_wheel(fused, version)
    legacy: dict[str, Any] = {}
    if page_layout != "interleaved":
        # The frozen kernels read the block-split pages that came before the 2026.09.30 release.
        if not getattr(module, "has_legacy", bool)():
            raise LibraryUnfitError(
                f"flash_mla {version} has no legacy kernels to read {page_layout}"
            )
        legacy = {"use_legacy": True}
    return adapt_wheel(fused, version, legacy)


def _import_wheel() -> ModuleType:
    try:
        return importlib.import_module("flash_mla")
    except ModuleNotFoundError as error:
        if error.name == "flash_mla":
            raise LibraryAbsentError(f"flash_mla is not installed; {INSTALL}") from error
        raise LibraryAbsentError(f"flash_mla does not import ({first_line(error)})") from error
    except (Exception, SystemExit) as error:  # a .so that does not load: OSError, RuntimeError, ...
        raise LibraryAbsentError(
            f"flash_mla {release('sgl-flash-mla')} is installed but does not load "
            f"({first_line(error)}); it needs a CUDA build of torch >= 2.10 and libcudart.so.13"
        ) from error


def _check_wheel(fused: ModuleType, version: str) -> None:
    for name, expected in _WHEEL_ARGUMENTS.items():
        function = getattr(fused, name, None)
        actual = _parameters(function)
        if actual[: len(expected)] != expected:
            raise LibraryUnfitError(f"flash_mla {version}: {name} has unknown arguments {actual}")
    for name in SCHEMAS:
        problem = schema_problem(WHEEL_NAMESPACE, name, in_place=False)
        if problem:
            raise LibraryUnfitError(f"flash_mla {version}: {problem}")


def _parameters(function: Any) -> tuple[str, ...]:
    """Names of a Python function's parameters; none of a compiled one's, which tells no names."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def adapt_wheel(fused: ModuleType, version: str, legacy: dict[str, Any]) -> AttentionLibrary:
    """The package's functions under the vendor ops' argument order.

    They take norm, RoPE and cast arguments first, then the attention's.
    """
    its_decode, its_prefill = fused.decode, fused.prefill
    its_permute_q_b, its_permute_wv = fused.permute_q_b_proj, fused.permute_wv_proj

    def decode(*args: Any) -> Sequence[torch.Tensor]:
        result: Sequence[torch.Tensor] = its_decode(*args[10:], *args[:10], **legacy)
        return result

    def prefill(*args: Any) -> Sequence[torch.Tensor]:
        result: Sequence[torch.Tensor] = its_prefill(*args[7:], *args[:7], **legacy)
        return result

    def permute_q_b(w: torch.Tensor, sf: torch.Tensor, h_q: int, d_q: int) -> Any:
        return its_permute_q_b((w, sf), h_q, d_q)

    def permute_wv(w: torch.Tensor, sf: torch.Tensor, wv_group_size: int, d_o: int) -> Any:
        return its_permute_wv((w, sf), wv_group_size, d_o)

    return AttentionLibrary("flash_mla", version, False, decode, prefill, permute_q_b, permute_wv)


def wheel_version(module: ModuleType) -> str:
    """Release and build of an imported flash_mla."""
    number = getattr(module, "__version__", None) or release("sgl-flash-mla")
    libraries = sorted(Path(module.__file__ or "").parent.glob("cuda.*.so"))
    return f"{number} ({build(libraries[0])})" if libraries else str(number)


SOURCES: dict[str, Callable[[PageLayout], AttentionLibrary]] = {
    "vllm": _from_vllm,
    "flash_mla": _from_wheel,
}
"""Where the ops are looked for, in order; each raises LibraryAbsentError or LibraryUnfitError."""


# ---- shared ---------------------------------------------------------------------


def package_folder(name: str) -> Path | None:
    """Folder of an installed top-level package, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # already imported by something that set no __spec__
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def release(distribution: str) -> str:
    """The installed distribution's version, or "(unknown version)"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(unknown version)"


def build(library: Path) -> str:
    """File name and the head of its sha256, which tells builds of one release apart."""
    with library.open("rb") as file:
        return f"{library.name} {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def first_line(error: BaseException) -> str:
    """The first line of what an exception comes from, for a one-sentence reason."""
    root = error.__cause__ or error  # torch says which file did not load, its cause says why
    return (str(root).strip().splitlines() or [type(root).__name__])[0][:200]


__all__ = [
    "DECODE",
    "PERMUTE_Q_B",
    "PERMUTE_WV",
    "PREFILL",
    "SOURCES",
    "AttentionLibrary",
    "LibraryAbsentError",
    "LibraryUnfitError",
    "Search",
    "adapt_wheel",
    "build",
    "find_attention",
    "first_line",
    "load_vllm_ops",
    "package_folder",
    "release",
    "vllm_library",
]
