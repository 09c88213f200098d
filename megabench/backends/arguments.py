"""The arguments of the two attention ops, bound to the contract's names and checked.

A backend's op methods take the contract's argument list; these classes hold it once, in its order,
so that nobody else repeats it. `check` runs before anything is written and names the argument that
is wrong. It reproduces the contract; the vendor's narrower demands (docs/contract.md) are not made.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, cast

import torch

from megabench.backends.checks import check_cache, check_tensor, require
from megabench.formats import (
    HEAD_DIM,
    NVFP4,
    PADDED_HEADS,
    QUANT_GROUP,
    ROPE_DIM,
    V4_FP8,
    WV_GROUP_SIZE,
)
from megabench.quant import QuantizedActivation, alloc_mega_attn_output

OUTPUT_WIDTH = WV_GROUP_SIZE * HEAD_DIM
OUTPUT_WORDS = OUTPUT_WIDTH // (4 * QUANT_GROUP)
FIXED: tuple[tuple[str, int], ...] = (
    ("d_v", HEAD_DIM),
    ("is_rope_neox_style", False),
    ("rope_dim", ROPE_DIM),
    ("num_per_channels", QUANT_GROUP),
    ("use_tma_aligned_col_major_sf", True),
    ("round_sf", True),
    ("use_packed_ue8m0", True),
)
"""Arguments with one legal value."""


@cache
def _inputs_of(kind: type[Any]) -> attrgetter[Any]:
    """Reads every field but the output pair; made once, since a call costs microseconds."""
    return attrgetter(*[field.name for field in fields(kind)][:-2])


class AttentionArguments:
    """What decode and prefill have in common; the fields are their subclasses'."""

    q: torch.Tensor
    attn_sink: torch.Tensor | None
    topk_length: torch.Tensor | None
    enable_q_norm: bool
    rms_norm_eps: float
    token_positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    n_wv_group: int
    out_fp8: torch.Tensor | None
    out_sf: torch.Tensor | None

    @property
    def q_norm_eps(self) -> float | None:
        """The epsilon of the query norm; None when the norm is off."""
        return self.rms_norm_eps if self.enable_q_norm else None

    def output(self) -> QuantizedActivation:
        """The caller's output pair, or a new one."""
        if self.out_fp8 is None or self.out_sf is None:
            return alloc_mega_attn_output(self.q.shape[0], self.n_wv_group, self.q.device)
        return QuantizedActivation(self.out_fp8, self.out_sf, torch.bfloat16, self.out_fp8.shape)

    def inputs(self) -> tuple[Any, ...]:
        """Every argument but the output pair, in order: what an op that allocates takes."""
        given: tuple[Any, ...] = _inputs_of(cast(Any, type(self)))(self)
        return given

    def empty_lse(self) -> torch.Tensor:
        """An uninitialised float32 [s_q, heads], for lse or max_logits."""
        return self.q.new_empty(self.q.shape[:2], dtype=torch.float32)

    def _check_common(self) -> None:
        for name, only in FIXED:
            given = getattr(self, name)
            if given != only:
                raise ValueError(f"{name}: only {only} is supported, got {given}")
        q, device = self.q, self.q.device
        require(q.dim() == 3, "q", "expected [s_q, heads, 512]")
        s_q, heads = q.shape[:2]
        check_tensor("q", q, torch.bfloat16, (s_q, heads, HEAD_DIM), device)
        require(heads in PADDED_HEADS, "q", f"head count must be one of {PADDED_HEADS}")
        require(
            q.stride(2) == 1 and q.stride(1) == HEAD_DIM, "q", "a token's memory must be contiguous"
        )
        if self.attn_sink is not None:
            check_tensor("attn_sink", self.attn_sink, torch.float32, (heads,), device)
        if self.topk_length is not None:
            check_tensor("topk_length", self.topk_length, torch.int32, (s_q,), device)
        check_tensor("token_positions", self.token_positions, torch.int32, (s_q,), device)
        check_tensor("cos_sin_cache", self.cos_sin_cache, torch.float32, (None, ROPE_DIM), device)
        require(self.cos_sin_cache.is_contiguous(), "cos_sin_cache", "must be contiguous")
        require(self.token_positions.is_contiguous(), "token_positions", "must be contiguous")
        require(
            self.n_wv_group * WV_GROUP_SIZE == heads,
            "n_wv_group",
            f"times {WV_GROUP_SIZE} must be the head count",
        )

    def _check_output(self) -> None:
        out_fp8, out_sf = self.out_fp8, self.out_sf
        require(
            (out_fp8 is None) == (out_sf is None), "out_sf", "give out_fp8 and out_sf, or neither"
        )
        if out_fp8 is None or out_sf is None:
            return
        s_q, groups, device = self.q.shape[0], self.n_wv_group, self.q.device
        check_tensor("out_fp8", out_fp8, torch.float8_e4m3fn, (s_q, groups, OUTPUT_WIDTH), device)
        check_tensor("out_sf", out_sf, torch.int32, (s_q, groups, OUTPUT_WORDS), device)
        require(out_fp8.is_contiguous(), "out_fp8", "must be contiguous")
        if s_q == 0:
            return
        token, group, word = out_sf.stride()
        require(s_q == 1 or token == 1, "out_sf", "token stride must be 1")
        require(word >= s_q, "out_sf", "the word stride is shorter than the tokens")
        require(group >= OUTPUT_WORDS * word, "out_sf", "groups overlap")


@dataclass(frozen=True)
class DecodeArguments(AttentionArguments):
    """Of `fused_norm_rope_attn_rope_cast_decode`, in the contract's order."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    d_v: int
    attn_sink: torch.Tensor | None
    topk_length: torch.Tensor | None
    extra_kv: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    enable_q_norm: bool
    rms_norm_eps: float
    token_positions: torch.Tensor
    is_rope_neox_style: bool
    rope_dim: int
    cos_sin_cache: torch.Tensor
    n_wv_group: int
    num_per_channels: int
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool
    out_fp8: torch.Tensor | None = None
    out_sf: torch.Tensor | None = None

    def check(self) -> None:
        """ValueError naming the first argument that is wrong."""
        self._check_common()
        s_q, device = self.q.shape[0], self.q.device
        record = check_cache("kv", self.kv, device)
        require(record is not NVFP4, "kv", "an NVFP4 record is for the extra cache only")
        check_tensor("indices", self.indices, torch.int32, (s_q, None), device)
        require(
            (self.extra_kv is None) == (self.extra_indices is None),
            "extra_indices",
            "give extra_kv and extra_indices, or neither",
        )
        if self.extra_kv is None or self.extra_indices is None:
            require(self.extra_topk_length is None, "extra_topk_length", "needs extra_kv")
        else:
            extra = check_cache("extra_kv", self.extra_kv, device)
            if not (extra is record or (extra is NVFP4 and record is not V4_FP8)):
                raise ValueError(f"extra_kv: {extra.name} does not go beside {record.name}")
            check_tensor("extra_indices", self.extra_indices, torch.int32, (s_q, None), device)
            if self.extra_topk_length is not None:
                lengths = self.extra_topk_length
                check_tensor("extra_topk_length", lengths, torch.int32, (s_q,), device)
        self._check_output()


@dataclass(frozen=True)
class PrefillArguments(AttentionArguments):
    """Of `fused_norm_rope_attn_rope_cast_fwd`, in the contract's order."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    d_v: int
    attn_sink: torch.Tensor | None
    topk_length: torch.Tensor | None
    enable_q_norm: bool
    rms_norm_eps: float
    token_positions: torch.Tensor
    is_rope_neox_style: bool
    rope_dim: int
    cos_sin_cache: torch.Tensor
    n_wv_group: int
    num_per_channels: int
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool
    out_fp8: torch.Tensor | None = None
    out_sf: torch.Tensor | None = None

    def check(self) -> None:
        """ValueError naming the first argument that is wrong."""
        self._check_common()
        check_tensor("kv", self.kv, torch.bfloat16, (None, 1, HEAD_DIM), self.q.device)
        require(
            self.kv.stride(0) == HEAD_DIM and self.kv.stride(2) == 1,
            "kv",
            "rows must be contiguous",
        )
        wanted = (self.q.shape[0], 1, None)
        check_tensor("indices", self.indices, torch.int32, wanted, self.q.device)
        self._check_output()
