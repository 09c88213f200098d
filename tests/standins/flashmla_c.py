"""A stand-in for vLLM's op library: `torch.ops._flashmla_C` with the vendor's schemas, on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import vendor_checks
import vendor_math
from torch import Tensor

ATTENTION = "Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
ATTENTION += "Tensor? topk_length"
EXTRA = "Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length"
REST = "bool enable_q_norm, float rms_norm_eps, Tensor token_positions, bool is_rope_neox_style, "
REST += "int rope_dim, Tensor cos_sin_cache, int n_wv_group, int num_per_channels, "
REST += "bool use_tma_aligned_col_major_sf, bool round_sf, bool use_packed_ue8m0"
OUT = "Tensor(d!)? out_fp8=None, Tensor(e!)? out_sf=None"
DECODE, PREFILL = "fused_norm_rope_attn_rope_cast_decode", "fused_norm_rope_attn_rope_cast_fwd"
PERMUTE_Q_B, PERMUTE_WV = "permute_q_b_proj", "permute_wv_proj"

# As the 0.33.0 wheel's library prints them.
SCHEMAS = {
    DECODE: f"({ATTENTION}, {EXTRA}, {REST}, {OUT}) -> Tensor[]",
    PREFILL: f"({ATTENTION}, {REST}, {OUT}) -> Tensor[]",
    PERMUTE_Q_B: "(Tensor q_b_proj, Tensor scale_factors, int h_q, int d_q) -> Tensor[]",
    PERMUTE_WV: "(Tensor wv_proj, Tensor scale_factors, int wv_group_size, int d_o) -> Tensor[]",
}


def _named(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    schema = torch._C.parse_schema(name + SCHEMAS[name])
    names = [argument.name for argument in schema.arguments]
    return dict(zip(names, (*args, *[None] * (len(names) - len(args))), strict=True))


def decode(*args: Any) -> list[Tensor]:
    named = _named(DECODE, args)
    vendor_checks.check_decode(named)
    return vendor_math.decode(named)


def prefill(*args: Any) -> list[Tensor]:
    named = _named(PREFILL, args)
    vendor_checks.check_prefill(named)
    return vendor_math.prefill(named)


def permute_q_b(w: Tensor, sf: Tensor, h_q: int, d_q: int) -> list[Tensor]:
    vendor_checks.check_permute_q_b(w, sf, h_q, d_q)
    return vendor_math.permute_q_b(w, sf, h_q)


def permute_wv(w: Tensor, sf: Tensor, wv_group_size: int, d_o: int) -> list[Tensor]:
    vendor_checks.check_permute_wv(w, sf, wv_group_size, d_o)
    return vendor_math.permute_wv(w, sf)


KERNELS = {
    DECODE: decode,
    PREFILL: prefill,
    PERMUTE_Q_B: permute_q_b,
    PERMUTE_WV: permute_wv,
}


def register(
    namespace: str = "_flashmla_C",
    names: Iterable[str] = SCHEMAS,
    schemas: dict[str, str] | None = None,
) -> torch.library.Library:
    """Define the ops as the vendor's library does, with its kind of registration (one DEF a
    namespace a process); `_destroy()` the result to unload it."""
    library = torch.library.Library(namespace, "DEF")
    for name in names:
        library.define(name + (SCHEMAS | (schemas or {}))[name])
        library.impl(name, KERNELS[name], "CPU")
    return library
