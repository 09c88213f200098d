"""The vendor's four op schemas, and whether a registered op has them.

Read from vLLM 0.33.0's `_flashmla_C.abi3.so`; the `flash_mla` wheel (sgl-flash-mla 1.0.0) registers
the same without the two out tensors, and allocates. A test holds the text against docs/contract.md.
"""

from __future__ import annotations

from typing import Any

import torch

DECODE = "fused_norm_rope_attn_rope_cast_decode"
PREFILL = "fused_norm_rope_attn_rope_cast_fwd"
PERMUTE_Q_B = "permute_q_b_proj"
PERMUTE_WV = "permute_wv_proj"

_NORM_ROPE_CAST = (
    "bool enable_q_norm, float rms_norm_eps, Tensor token_positions, bool is_rope_neox_style, "
    "int rope_dim, Tensor cos_sin_cache, int n_wv_group, int num_per_channels, "
    "bool use_tma_aligned_col_major_sf, bool round_sf, bool use_packed_ue8m0"
)
_ATTENTION = (
    "Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
    "Tensor? topk_length"
)
_EXTRA = "Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length"
_OUT = "Tensor(d!)? out_fp8=None, Tensor(e!)? out_sf=None"

SCHEMAS: dict[str, str] = {
    DECODE: f"{DECODE}({_ATTENTION}, {_EXTRA}, {_NORM_ROPE_CAST}, {_OUT}) -> Tensor[]",
    PREFILL: f"{PREFILL}({_ATTENTION}, {_NORM_ROPE_CAST}, {_OUT}) -> Tensor[]",
    PERMUTE_Q_B: f"{PERMUTE_Q_B}(Tensor q_b_proj, Tensor scale_factors, int h_q, int d_q)"
    " -> Tensor[]",
    PERMUTE_WV: f"{PERMUTE_WV}(Tensor wv_proj, Tensor scale_factors, int wv_group_size, int d_o)"
    " -> Tensor[]",
}
"""Op name to schema; both attention ops mutate and return their out tensors where given."""


def without_out(schema: str) -> str:
    """The schema of an op that allocates its outputs."""
    return schema.replace(f", {_OUT}", "")


def _arguments(schema: Any) -> list[tuple[str, str, bool]]:
    """(name, type, written) of each argument; alias letters carry no meaning of their own."""
    return [
        (a.name, str(a.type), a.alias_info is not None and a.alias_info.is_write)
        for a in schema.arguments
    ]


def schema_problem(namespace: str, name: str, *, in_place: bool) -> str | None:
    """Why `torch.ops.<namespace>.<name>` is not the op we call, or None when it is.

    Names, order and types of the arguments must be the known ones: a build that moved or added one
    would take our positional arguments for something else.
    """
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return f"{namespace}.{name} is not registered"
    expected = SCHEMAS[name] if in_place else without_out(SCHEMAS[name])
    if "default" not in packet.overloads():
        return f"{namespace}.{name} has unknown overloads: {packet.overloads()}; known: {expected}"
    actual = packet.default._schema
    parsed = torch._C.parse_schema(expected)
    if _arguments(actual) == _arguments(parsed) and len(actual.returns) == len(parsed.returns):
        return None
    return f"{namespace}.{name} has an unknown schema: {actual}; known: {expected}"
