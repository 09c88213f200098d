"""The `flashmla` backend: the vendor's kernels on SM100/SM103, under the contract's ops.

Attention and the weight permutes come from vLLM's op library or the `flash_mla` package, the
einsum and the linears from DeepGEMM. What neither has (Q pad and KV insert, gather, index lists,
activation quantizer) are the Triton kernels of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from megabench.backends.arguments import DecodeArguments, PrefillArguments
from megabench.backends.base import EINSUM_RECIPE, Pair, Support
from megabench.backends.checks import check_tensor, require
from megabench.backends.flashmla.binding import AttentionLibrary, find_attention
from megabench.backends.flashmla.gemm import (
    GemmLibrary,
    PackedScales,
    compiler_problem,
    find_gemm,
    pack_rows,
)
from megabench.backends.flashmla.quantize import quantize_packed
from megabench.backends.torch_eager import TorchBackend
from megabench.backends.triton.backend import TritonBackend
from megabench.formats import QUANT_GROUP, KVRecord, PageLayout
from megabench.geometry import Geometry
from megabench.quant import quantize_activation

DEVICE_FAMILY = 10
"""Major compute capability of SM100 and SM103, the only ones the vendor built for."""


class VendorOps(TorchBackend):
    """The vendor's ops over another backend's. Building one never fails; see `supports`."""

    name = "flashmla"

    def __init__(self, page_layout: PageLayout = "interleaved") -> None:
        super().__init__(page_layout)
        self._attention_search = find_attention(page_layout)
        self._gemm_search = find_gemm()
        self._vendor = self._attention_search.library or AttentionLibrary.missing(
            self._attention_search.reason
        )
        self._gemm = self._gemm_search.library or GemmLibrary.missing(self._gemm_search.reason)
        self._packed = PackedScales()

    # ---- what is here ---------------------------------------------------------

    @property
    def version(self) -> str | None:
        """Libraries in use with release and build, for the run's record; None when none is."""
        found = (self._attention_search.library, self._gemm_search.library)
        return "; ".join(f"{lib.name} {lib.version}" for lib in found if lib) or None

    @property
    def timing_note(self) -> str | None:
        """What a time of this backend contains beside the vendor's kernels, or None."""
        library = self._attention_search.library
        if library is None or library.in_place:
            return None
        return (
            f"{library.name} allocates its outputs: each attention call includes one copy of them"
        )

    def supports(self, geometry: Geometry, device: torch.device, record: KVRecord) -> Support:
        """As vLLM's `is_flashmla_mega_attn_supported`, in its order, then DeepGEMM."""
        search, gemm = self._attention_search, self._gemm_search
        if search.library is None and not search.unfit:
            return Support(False, search.reason)
        problem = self.device_problem(device)
        if problem:
            return Support(False, problem)
        if search.library is None:
            return Support(False, search.reason)
        if gemm.library is None:
            return Support(False, gemm.reason)
        problem = compiler_problem() if device.type == "cuda" else None
        return Support(problem is None, problem)

    def device_problem(self, device: torch.device) -> str | None:
        """Why the vendor's kernels cannot run on `device`, whatever is installed."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return "FlashMLA mega attention requires a CUDA device."
        major, minor = torch.cuda.get_device_capability(device)
        if major != DEVICE_FAMILY:
            return f"FlashMLA mega attention requires sm_10x GPUs; {device} is sm_{major}{minor}."
        return None

    # ---- attention ------------------------------------------------------------

    # Passed on as they came: the vendor checks its own arguments, and a call costs microseconds.

    def fused_norm_rope_attn_rope_cast_decode(
        self, *args: Any, **kwargs: Any
    ) -> list[torch.Tensor]:
        if self._vendor.in_place:
            return list(self._vendor.decode(*args, **kwargs))
        return _into(self._vendor.decode, DecodeArguments, args, kwargs)

    def fused_norm_rope_attn_rope_cast_fwd(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if self._vendor.in_place:
            return list(self._vendor.prefill(*args, **kwargs))
        return _into(self._vendor.prefill, PrefillArguments, args, kwargs)

    # ---- weights --------------------------------------------------------------

    def permute_q_b_proj(
        self, q_b_proj: torch.Tensor, scale_factors: torch.Tensor, h_q: int, d_q: int
    ) -> list[torch.Tensor]:
        return list(self._vendor.permute_q_b_proj(q_b_proj, scale_factors, h_q, d_q))

    def permute_wv_proj(
        self, wv_proj: torch.Tensor, scale_factors: torch.Tensor, wv_group_size: int, d_o: int
    ) -> list[torch.Tensor]:
        return list(self._vendor.permute_wv_proj(wv_proj, scale_factors, wv_group_size, d_o))

    def prepare(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        if scale.element_size() == 1:
            self._packed.prepare(weight, scale)

    # ---- matrix products ------------------------------------------------------

    def fp8_einsum(
        self, equation: str, x: Pair, w: Pair, out: torch.Tensor, recipe: tuple[int, int, int]
    ) -> None:
        self._gemm.fp8_einsum(equation, x, w, out, recipe=recipe)

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        if not _is_linear(x, w, sw):
            check_tensor("w", w, torch.float8_e4m3fn, (None, None), x.device)
            check_tensor("x", x, torch.bfloat16, (None, w.shape[1]), x.device)
            check_tensor("sw", sw, torch.uint8, (w.shape[0], w.shape[1] // QUANT_GROUP), x.device)
        out = x.new_empty((x.shape[0], w.shape[0]))
        weight = (w, self._packed.get(w, sw))
        self._gemm.fp8_gemm_nt(self.quantize(x), weight, out, recipe=EINSUM_RECIPE)
        return out

    def quantize(self, x: torch.Tensor) -> Pair:
        """x bf16 [T, K] as an operand: e4m3 [T, K], ue8m0 words int32 [T, ceil(K/128)] MN-major."""
        codes, scale = quantize_activation(x)
        return codes.view(torch.float8_e4m3fn), pack_rows(scale)


class FlashmlaBackend(VendorOps, TritonBackend):
    """The `flashmla` backend: the vendor's ops, and Triton kernels for the rest of a step."""

    def quantize(self, x: torch.Tensor) -> Pair:
        return quantize_packed(x)


def _is_linear(x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> bool:
    """Whether a linear's arguments fit, at a fraction of the time that naming a fault takes."""
    if w.dim() != 2 or x.dim() != 2:
        return False
    n, k = w.shape
    return (
        x.dtype == torch.bfloat16
        and w.dtype == torch.float8_e4m3fn
        and sw.dtype == torch.uint8
        and x.shape[1] == k
        and sw.shape == (n, k // QUANT_GROUP)
    )


_INPUTS = {kind: len(fields(kind)) - 2 for kind in (DecodeArguments, PrefillArguments)}
"""How many arguments come before the output pair."""


def _into(
    op: Callable[..., Sequence[torch.Tensor]],
    kind: type[DecodeArguments] | type[PrefillArguments],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[torch.Tensor]:
    """Call an op that allocates, then copy its pair into the caller's, where there is one."""
    count = _INPUTS[kind]
    if kwargs or len(args) not in (count, count + 2):
        # Only where it must be: binding costs more than all the rest of our call.
        bound = kind(*args, **kwargs)
        args = (*bound.inputs(), bound.out_fp8, bound.out_sf)
    out_fp8, out_sf = args[count:] or (None, None)
    require((out_fp8 is None) == (out_sf is None), "out_sf", "give out_fp8 and out_sf, or neither")
    made_fp8, made_sf, *rest = op(*args[:count])
    if out_fp8 is None or out_sf is None:
        return [made_fp8, made_sf, *rest]
    out_fp8.copy_(made_fp8)
    out_sf.copy_(made_sf)
    return [out_fp8, out_sf, *rest]


def library_versions() -> dict[str, str]:
    """Vendor libraries in use here by name, each with release and build; empty when none is."""
    found = (find_attention("interleaved").library, find_gemm().library)
    return {library.name: library.version for library in found if library}
